// Memory of the device: memory of the host that is kept apart, full of NaN when it is new, gone when it is freed.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

#include "counts.h"
#include "runtime.h"

using runtime::Kind;
using runtime::Place;
using runtime::told;

namespace {

std::mutex mutex;
std::map<char*, Place>& places() {
  static auto* all = new std::map<char*, Place>;
  return *all;
}
size_t used[64];

size_t limit() {
  const char* text = getenv("WITHOUT_GPU_BYTES");
  return text ? strtoull(text, nullptr, 10) : 8ull << 30;
}

void* map_pages(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

cudaError_t take(void** into, size_t bytes, Kind kind, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  *into = nullptr;
  if (!bytes) return cudaSuccess;
  bytes = (bytes + 4095) / 4096 * 4096;
  if (kind == Kind::device && used[device] + bytes > limit()) return told(cudaErrorMemoryAllocation);
  char* start = (char*)map_pages(bytes);
  if (!start) return told(cudaErrorMemoryAllocation);
  without_gpu_count(kind == Kind::device ? counts::DEVICE_ALLOCATIONS : counts::PINNED_ALLOCATIONS);
  if (kind == Kind::device) {
    if (!runtime::is_null()) memset(start, 0xff, bytes);
    used[device] += bytes;
  }
  places()[start] = {kind, device, start, bytes};
  *into = start;
  return cudaSuccess;
}

cudaError_t drop(void* address, int device) {
  if (!address) return cudaSuccess;
  // As CUDA's: it waits for all that may still use the memory.
  if (!queues::wait_for_device(device)) return runtime::waited(false);
  std::lock_guard<std::mutex> lock(mutex);
  auto found = places().find((char*)address);
  if (found == places().end()) return told(cudaErrorInvalidValue);
  if (found->second.kind == Kind::device) used[found->second.device] -= found->second.bytes;
  munmap(address, found->second.bytes);
  places().erase(found);
  return cudaSuccess;
}

}  // namespace

Place runtime::place_of(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = places().upper_bound((char*)address);
  if (after == places().begin()) return {};
  const Place& found = std::prev(after)->second;
  return (char*)address < found.start + found.bytes ? found : Place{};
}

extern "C" {

// Writes start and bytes of at most `room` allocations of a device; returns how many there are.
int without_gpu_allocations(int device, uint64_t* into, int room) {
  std::lock_guard<std::mutex> lock(mutex);
  int count = 0;
  for (auto& [start, place] : places()) {
    if (place.kind == Kind::device && place.device != device) continue;
    if (count < room) into[2 * count] = (uint64_t)start, into[2 * count + 1] = place.bytes;
    count++;
  }
  return count;
}

cudaError_t cudaMalloc(void** into, size_t bytes) { return take(into, bytes, Kind::device, runtime::current_device()); }
cudaError_t cudaMallocAsync(void** into, size_t bytes, cudaStream_t) { return cudaMalloc(into, bytes); }
cudaError_t cudaFree(void* address) { return drop(address, runtime::place_of(address).device); }
cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
cudaError_t cudaHostAlloc(void** into, size_t bytes, unsigned) { return take(into, bytes, Kind::pinned, -1); }
cudaError_t cudaFreeHost(void* address) { return drop(address, -1); }

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  if (getenv("WITHOUT_GPU_NO_PINNING")) return told(cudaErrorNotSupported);
  if (runtime::place_of(address).kind != Kind::pageable) return told(cudaErrorHostMemoryAlreadyRegistered);
  without_gpu_count(counts::PINNED_ALLOCATIONS);
  std::lock_guard<std::mutex> lock(mutex);
  places()[(char*)address] = {Kind::pinned, runtime::current_device(), (char*)address, bytes};
  return cudaSuccess;
}

// It waits for nothing: that no copy uses the memory any more is for the program to see to.
cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  return places().erase((char*)address) ? cudaSuccess : told(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = limit();
  *free = limit() - used[runtime::current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* into, const void* address) {
  memset(into, 0, sizeof *into);
  Place place = runtime::place_of(address);
  bool is_device = place.kind == Kind::device;
  into->type = is_device ? cudaMemoryTypeDevice : place.kind == Kind::pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  into->device = place.device;
  if (place.kind != Kind::pageable) into->devicePointer = (void*)address;
  if (!is_device) into->hostPointer = (void*)address;
  return cudaSuccess;
}
}
