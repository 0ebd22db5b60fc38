// Devices, errors, and launches of kernels, which this library cannot carry out.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "counts.h"
#include "runtime.h"

using runtime::told;

thread_local const char* runtime::muted = nullptr;

namespace {

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;
std::mutex mutex;
std::map<const void*, std::string>& kernels() {
  static auto* names = new std::map<const void*, std::string>;
  return *names;
}

// PyTorch's kernels are machine code of GPUs. operations.cpp carries out the operation that a launch belongs to; a launch
// that belongs to none would leave memory as it is, and is a failure.
cudaError_t launch(const void* function) {
  without_gpu_count(counts::LAUNCHES);
  if (runtime::is_null()) return runtime::forget_carried(), cudaSuccess;
  if (runtime::muted) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = kernels().find(function);
  queues::fail("a kernel was launched outside of any known operation: " + (found == kernels().end() ? "?" : found->second));
  return told(cudaErrorNotSupported);
}

}  // namespace

cudaError_t runtime::told(cudaError_t code) { return last = code; }
int runtime::current_device() { return current; }
cudaError_t runtime::waited(bool has_ended) { return has_ended ? cudaSuccess : told(cudaErrorLaunchFailure); }

extern "C" {
void without_gpu_mute(const char* operation) { runtime::muted = operation; }

cudaError_t cudaGetDeviceCount(int* into) { return *into = runtime::device_count(), cudaSuccess; }
cudaError_t cudaGetDevice(int* into) { return *into = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= runtime::device_count()) return told(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* into, int) {
  memset(into, 0, sizeof *into);
  strcpy(into->name, "a stand-in of an H100");
  size_t free;
  cudaMemGetInfo(&free, &into->totalGlobalMem);
  into->major = 9;
  into->multiProcessorCount = 132;
  into->warpSize = 32;
  into->maxThreadsPerBlock = into->maxThreadsDim[0] = into->maxThreadsDim[1] = 1024;
  into->maxThreadsDim[2] = 64;
  into->maxThreadsPerMultiProcessor = 2048;
  into->sharedMemPerBlock = 49152;
  into->sharedMemPerMultiprocessor = 233472;
  into->sharedMemPerBlockOptin = 232448;
  into->regsPerBlock = into->regsPerMultiprocessor = 65536;
  into->maxGridSize[0] = 2147483647;
  into->maxGridSize[1] = into->maxGridSize[2] = 65535;
  into->l2CacheSize = 50 << 20;
  into->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* into, cudaDeviceAttr which, int) {
  static const std::map<int, int> known = {{cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}};
  auto found = known.find(which);
  *into = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* into, int, int) { return *into = 1, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* into, int room, int device) {
  snprintf(into, room, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* into) { return *into = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* into) { return *into = 13000, cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** into, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *into = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  cudaError_t code = last;
  if (last != cudaErrorLaunchFailure) last = cudaSuccess;
  return code;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of the stand-in of CUDA";
}
const char* cudaGetErrorString(cudaError_t code) {
  static thread_local std::string text;
  if (code == cudaErrorLaunchFailure) text = "unspecified launch failure: " + queues::failure();
  else if (code == cudaSuccess) text = "no error";
  else if (code == cudaErrorMemoryAllocation) text = "out of memory";
  else if (code == cudaErrorNotSupported) text = "operation not supported";
  else if (code == cudaErrorInvalidDevice) text = "invalid device ordinal";
  else text = "error " + std::to_string(code) + " of the stand-in of CUDA";
  return text.c_str();
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(mutex);
  kernels()[host] = name;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local Configuration configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(cudaStream_t*)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* into, const void* host) { return *into = (cudaKernel_t)host, cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return launch(function); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return launch(function); }
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* into, const void*, int, size_t) {
  return *into = 8, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* into, const void*, int, size_t, unsigned) {
  return *into = 8, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* into, const void*) {
  memset(into, 0, sizeof *into);
  into->maxThreadsPerBlock = 1024;
  into->binaryVersion = into->ptxVersion = 90;
  into->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
