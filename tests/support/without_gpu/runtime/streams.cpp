// Streams and events as CUDA's functions.
#include <pthread.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

#include "counts.h"
#include "runtime.h"

using queues::Point;
using runtime::stream_of;
using runtime::told;
using runtime::waited;

namespace {

struct Event {
  Point point;
  std::chrono::steady_clock::time_point recorded;
};

Point point_of(cudaEvent_t handle) { return ((Event*)handle)->point; }

// NCCL's, which asks as long as there is something to ask for.
bool is_watchdog() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return !strncmp(name, "pt_nccl_watch", 13);
}

// Somebody who asks again and again, and does nothing else, waits, too: the operation is demanded then. Not so torch's
// watchdog, or an allocator that asks in passing and whose thread goes on.
cudaError_t is_done(const Point& point) {
  static thread_local const bool hopes = is_watchdog();
  if (!hopes) without_gpu_count(counts::EVENT_QUERIES);
  if (runtime::is_null()) return cudaSuccess;
  if (!queues::failure().empty()) return waited(false);
  if (queues::has_ended(point)) return cudaSuccess;
  static thread_local Point asked;
  static thread_local uint64_t times = 0, enqueued = 0;
  bool is_another = asked.stream != point.stream || asked.position != point.position;
  if (is_another || enqueued != queues::enqueued_here()) asked = point, times = 0, enqueued = queues::enqueued_here();
  if (++times >= 20 && !hopes) queues::demand(point);
  return told(cudaErrorNotReady);
}

}  // namespace

queues::Stream* runtime::stream_of(cudaStream_t handle) {
  bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? queues::default_stream(current_device()) : (queues::Stream*)handle;
}

extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* into, unsigned, int priority) {
  *into = (cudaStream_t)queues::make_stream(runtime::current_device(), priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* into) { return cudaStreamCreateWithPriority(into, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* into, unsigned) { return cudaStreamCreateWithPriority(into, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* into) {
  *into = queues::priority_of(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return is_done(queues::end_of(stream_of(stream))); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (runtime::muted) {
    queues::fail(std::string("the code of ") + runtime::muted + " waits for a stream: operations.cpp needs to know it");
    return told(cudaErrorNotSupported);
  }
  without_gpu_count(counts::HOST_WAITS);
  return waited(queues::wait({queues::end_of(stream_of(stream))}));
}
cudaError_t cudaDeviceSynchronize() {
  without_gpu_count(counts::HOST_WAITS);
  return waited(queues::wait_for_device(runtime::current_device()));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  without_gpu_count(counts::STREAM_WAITS);
  if (runtime::is_null()) return cudaSuccess;
  Point point = point_of(event);
  if (!point.stream || runtime::muted) return cudaSuccess;  // never recorded: nothing to wait for
  queues::Operation operation;
  operation.name = "a wait for an event";
  operation.needs = {point};
  operation.advance = [] { return true; };
  queues::enqueue(stream_of(stream), std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* into) {
  *into = (cudaEvent_t) new Event;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* into, unsigned) { return cudaEventCreate(into); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  without_gpu_count(counts::EVENT_RECORDS);
  *(Event*)event = {queues::end_of(stream_of(stream)), std::chrono::steady_clock::now()};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return is_done(point_of(event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  without_gpu_count(counts::HOST_WAITS);
  return waited(queues::wait({point_of(event)}));
}
// Of the host's calls: nothing here takes the time that a GPU takes.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  auto between = ((Event*)last)->recorded - ((Event*)first)->recorded;
  *milliseconds = std::chrono::duration<float, std::milli>(between).count();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* into) {
  *into = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* into, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *into = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (runtime::is_null()) return function(argument), cudaSuccess;
  queues::Operation operation;
  operation.name = "a function of the host";
  operation.advance = [function, argument] { return function(argument), true; };
  queues::enqueue(stream_of(stream), std::move(operation));
  return cudaSuccess;
}

// For Python: `call` is called with `token` when the stream gets there.
void without_gpu_enqueue(void* stream, const char* name, void (*call)(uint64_t), uint64_t token) {
  queues::Operation operation;
  operation.name = name;
  operation.advance = [call, token] { return call(token), true; };
  queues::enqueue(stream_of((cudaStream_t)stream), std::move(operation));
}
void without_gpu_fail(const char* text) { queues::fail(text); }
}
