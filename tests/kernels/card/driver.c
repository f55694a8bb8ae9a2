// libcuda.so.1 of a GPU that is not there: its memory is the host's, and a launch calls back with its parameters.
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef CUresult (*Launched)(uintptr_t function, const unsigned *grid, uintptr_t stream, void **parameters);

static Launched launched = 0;
static uintptr_t last_function = 4096;

void card_call_on_launch(Launched function) { launched = function; }

CUresult cuLaunchKernelEx(const unsigned *config, void *function, void **parameters, void **extra) {
  // CUlaunchConfig has the sizes of grid and block, the bytes of shared memory and, after 32 bytes, the stream.
  return launched((uintptr_t)function, config, *(const uintptr_t *)((const char *)config + 32), parameters);
}

CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)(last_function += 16);  // each kernel has a handle of its own
  return 0;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  enum { WARP_SIZE = 10, PROCESSORS = 16, SHARED_MEMORY = 97 };
  *value = attribute == SHARED_MEMORY ? 232448 : attribute == PROCESSORS ? 132 : attribute == WARP_SIZE ? 32 : 65536;
  return 0;
}

CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0;  // threads in a block; everything else is not used
  return 0;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the interpreted kernel failed";
  return 0;
}

// What else Triton asks of a driver succeeds and does nothing.
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDeviceGet(int *device, int index) { *device = index; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
CUresult cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxPushCurrent_v2(void *context) { return 0; }
CUresult cuCtxPopCurrent_v2(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return 0; }
CUresult cuCtxSetLimit(int limit, size_t value) { return 0; }
CUresult cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
CUresult cuStreamGetCtx(void *stream, void **context) { *context = (void *)1; return 0; }
CUresult cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
CUresult cuModuleLoadData(void **module, const void *image) { *module = (void *)2; return 0; }
CUresult cuModuleUnload(void *module) { return 0; }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return 0; }
CUresult cuPointerGetAttribute(uint64_t *data, int attribute, uint64_t address) { *data = address; return 0; }
CUresult cuOccupancyMaxActiveClusters(int *number, void *function, const void *config) { *number = 1; return 0; }
CUresult cuLaunchKernel(void *function) { return 1; }
CUresult cuTensorMapEncodeTiled(void *map) { return 1; }
CUresult cuTensorMapEncodeIm2col(void *map) { return 1; }
