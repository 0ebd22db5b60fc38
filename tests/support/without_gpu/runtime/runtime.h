// What the files of this libcudart share, and what the stand-in of NCCL and PyTorch's operations ask of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>

#include "queues.h"

namespace runtime {

// Remembered for cudaGetLastError, as CUDA does.
cudaError_t told(cudaError_t code);
int current_device();
inline int device_count() {
  static const char* text = getenv("WITHOUT_GPU_COUNT");  // once: all threads ask, and a program may change others
  static const int count = text ? atoi(text) : 1;
  return count;
}
// A null device: launches, copies, waits and collectives return at once. What is read of it is zeros; only what a small
// copy has brought there is read as it was brought, until the next launch, and of collectives behind that, too: kernels
// add to what ranks tell each other, and what they add is zeros. So ranks know what they need of each other.
inline bool is_null() {
  static const char* text = getenv("WITHOUT_GPU_NULL");
  static const bool found = text && atoi(text);
  return found;
}
// Of a null device: a copy, to or from it or within; and a launch.
void carry(void* into, const void* from, size_t bytes, bool is_collective = false);
void forget_carried();
queues::Stream* stream_of(cudaStream_t handle);
// The host waits: an error of the runtime after a failure.
cudaError_t waited(bool has_ended);

enum class Kind { pageable, pinned, device };
struct Place {
  Kind kind = Kind::pageable;
  int device = -1;
  char* start = nullptr;
  size_t bytes = 0;
};
// Where memory lies.
Place place_of(const void* address);

// While PyTorch's own code of an operation runs, of which only the results' shapes count: see operations.cpp.
extern thread_local const char* muted;

}  // namespace runtime
