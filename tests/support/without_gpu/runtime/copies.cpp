// Copies, as late as CUDA allows each kind of memory.
//
// From pageable memory the values are taken at once (CUDA stages them); to pageable memory the host waits for the copy.
// Between pinned memory and the device nothing happens until somebody waits.
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "counts.h"
#include "runtime.h"

using runtime::Kind;
using runtime::told;

namespace {

cudaError_t refuse_in_muted(const char* what) {
  queues::fail(std::string("the code of ") + runtime::muted + " asks for values (" + what +
               "): operations.cpp needs to know it as one whose host does");
  return told(cudaErrorNotSupported);
}

// Where memory of a null device holds what was brought there.
struct Brought {
  size_t bytes;
  uint64_t launches;  // before it was
};
struct Carried {
  std::mutex mutex;
  std::map<const char*, Brought> places;  // by start
  std::atomic<uint64_t> launches{0};
};
Carried& carried() {
  static auto* one = new Carried;
  return *one;
}
const size_t MOST_CARRIED = 64 << 10;

counts::Call of(Kind source, Kind target) {
  if (source != Kind::device) return counts::COPIES_TO_DEVICE;
  return target == Kind::device ? counts::COPIES_ON_DEVICE : counts::COPIES_TO_HOST;
}

cudaError_t copy(void* into, const void* from, size_t bytes, queues::Stream* stream, bool blocking) {
  if (!bytes) return cudaSuccess;
  Kind source = runtime::place_of(from).kind, target = runtime::place_of(into).kind;
  bool waits = blocking || target == Kind::pageable;
  if (runtime::muted) return waits ? refuse_in_muted("a blocking copy") : cudaSuccess;
  without_gpu_count(of(source, target));
  if (blocking) without_gpu_count(counts::HOST_WAITS);  // torch itself waits behind a copy to pageable memory
  if (runtime::is_null()) return runtime::carry(into, from, bytes), cudaSuccess;
  queues::Operation operation;
  operation.name = "a copy of " + std::to_string(bytes) + " bytes";
  std::shared_ptr<std::vector<char>> staged;
  if (source == Kind::pageable) {
    staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    from = staged->data();
  }
  operation.advance = [into, from, bytes, staged] { return memmove(into, from, bytes), true; };
  queues::Point point = queues::enqueue(stream, std::move(operation));
  return waits ? runtime::waited(queues::wait({point})) : cudaSuccess;
}

cudaError_t fill(void* into, int value, size_t bytes, queues::Stream* stream) {
  if (runtime::muted || !bytes) return cudaSuccess;
  without_gpu_count(counts::FILLS);
  if (runtime::is_null()) return cudaSuccess;
  queues::Operation operation;
  operation.name = "a memset of " + std::to_string(bytes) + " bytes";
  operation.advance = [into, value, bytes] { return memset(into, value, bytes), true; };
  queues::enqueue(stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace

void runtime::carry(void* into, const void* from, size_t bytes, bool is_collective) {
  bool is_target = place_of(into).kind == Kind::device, is_source = place_of(from).kind == Kind::device;
  if (!is_target && !is_source) return (void)memmove(into, from, bytes);
  std::lock_guard<std::mutex> lock(carried().mutex);
  auto& places = carried().places;
  bool is_known = !is_source;
  if (is_source) {
    auto after = places.upper_bound((const char*)from);
    if (after != places.begin()) {
      auto& [start, brought] = *std::prev(after);
      bool is_whole = (const char*)from + bytes <= start + brought.bytes;
      is_known = is_whole && (is_collective || brought.launches == carried().launches);
    }
  }
  if (!is_target) return (void)(is_known ? memmove(into, from, bytes) : memset(into, 0, bytes));
  if (!is_known || bytes > MOST_CARRIED) return (void)places.erase((const char*)into);
  memmove(into, from, bytes);
  places[(const char*)into] = {bytes, carried().launches};
}

void runtime::forget_carried() { carried().launches.fetch_add(1, std::memory_order_relaxed); }

extern "C" {
cudaError_t cudaMemcpy(void* into, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(into, from, bytes, runtime::stream_of(nullptr), true);
}
cudaError_t cudaMemcpyAsync(void* into, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(into, from, bytes, runtime::stream_of(stream), false);
}
cudaError_t cudaMemcpyPeerAsync(void* into, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(into, from, bytes, runtime::stream_of(stream), false);
}
cudaError_t cudaMemset(void* into, int value, size_t bytes) { return fill(into, value, bytes, runtime::stream_of(nullptr)); }
cudaError_t cudaMemsetAsync(void* into, int value, size_t bytes, cudaStream_t stream) {
  return fill(into, value, bytes, runtime::stream_of(stream));
}
}
