// The functions of libcuda that Triton calls: it loads its kernels by them, and launches.
//
// Only a null device runs Triton's own launcher. Elsewhere `launches.py` takes its place, and executes the kernel's PTX.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "counts.h"
#include "runtime.h"

namespace {

enum { OK = 0, NOT_SUPPORTED = 801 };
char something;  // what handles point to

int handle(void** into) { return *into = &something, OK; }

}  // namespace

extern "C" {
int cuInit(unsigned) { return OK; }
int cuDriverGetVersion(int* into) { return *into = 13000, OK; }
int cuGetErrorString(int, const char** into) { return *into = "an error of the stand-in of CUDA's driver", OK; }
int cuDeviceGetCount(int* into) { return *into = runtime::device_count(), OK; }
int cuDeviceGet(int* into, int device) { return *into = device, OK; }
int cuDeviceGetAttribute(int* into, int which, int device) {
  return cudaDeviceGetAttribute(into, (cudaDeviceAttr)which, device);
}
int cuDevicePrimaryCtxRetain(void** into, int) { return handle(into); }
int cuCtxGetCurrent(void** into) { return handle(into); }
int cuCtxSetCurrent(void*) { return OK; }
int cuCtxGetDevice(int* into) { return *into = runtime::current_device(), OK; }
int cuCtxGetLimit(size_t* into, int) { return *into = 1 << 20, OK; }
int cuCtxSetLimit(int, size_t) { return OK; }

int cuModuleLoadData(void** into, const void*) { return handle(into); }
int cuModuleUnload(void*) { return OK; }
int cuModuleGetFunction(void** into, void*, const char*) { return handle(into); }
int cuFuncGetAttribute(int* into, int which, void*) { return *into = which == 0 ? 1024 : 0, OK; }  // 0: threads of a block
int cuFuncSetAttribute(void*, int, int) { return OK; }
int cuFuncSetCacheConfig(void*, int) { return OK; }
int cuOccupancyMaxActiveClusters(int* into, void*, const void*) { return *into = 1, OK; }
int cuTensorMapEncodeTiled() { return NOT_SUPPORTED; }
int cuTensorMapEncodeIm2col() { return NOT_SUPPORTED; }
int cuPointerGetAttribute(void* into, int, uint64_t address) { return *(uint64_t*)into = address, OK; }

int cuLaunchKernelEx(const void*, void*, void**, void**) {
  without_gpu_count(counts::TRITON_LAUNCHES);
  if (runtime::is_null()) return runtime::forget_carried(), OK;
  queues::fail("Triton's own launcher was called: launches.py takes its place, and WITHOUT_GPU_NULL=1 lets it launch nothing");
  return NOT_SUPPORTED;
}
}
