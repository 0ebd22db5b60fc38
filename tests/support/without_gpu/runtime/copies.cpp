// Copies, as late as CUDA allows each kind of memory.
//
// From pageable memory the values are taken at once (CUDA stages them); to pageable memory the host waits for the copy.
// Between pinned memory and the device nothing happens until somebody waits.
#include <cstring>
#include <memory>
#include <vector>

#include "runtime.h"

using runtime::Kind;
using runtime::told;

namespace {

cudaError_t refuse_in_muted(const char* what) {
  queues::fail(std::string("the code of ") + runtime::muted + " asks for values (" + what +
               "): operations.cpp needs to know it as one whose host does");
  return told(cudaErrorNotSupported);
}

cudaError_t copy(void* into, const void* from, size_t bytes, queues::Stream* stream, bool blocking) {
  if (!bytes) return cudaSuccess;
  Kind source = runtime::place_of(from).kind, target = runtime::place_of(into).kind;
  bool waits = blocking || target == Kind::pageable;
  if (runtime::muted) return waits ? refuse_in_muted("a blocking copy") : cudaSuccess;
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
  queues::Operation operation;
  operation.name = "a memset of " + std::to_string(bytes) + " bytes";
  operation.advance = [into, value, bytes] { return memset(into, value, bytes), true; };
  queues::enqueue(stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace

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
