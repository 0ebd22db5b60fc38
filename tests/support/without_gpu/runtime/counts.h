// How often the program called what costs the host something on a GPU.
#pragma once

namespace counts {

enum Call {
  LAUNCHES, TRITON_LAUNCHES, LIBRARY_LAUNCHES, COLLECTIVES, COPIES_TO_DEVICE, COPIES_TO_HOST, COPIES_ON_DEVICE, FILLS,
  EVENT_RECORDS, EVENT_QUERIES, STREAM_WAITS, HOST_WAITS, DEVICE_ALLOCATIONS, PINNED_ALLOCATIONS, CALLS
};

}  // namespace counts

extern "C" {
void without_gpu_count(int call);
}
