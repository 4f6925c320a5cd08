/* A libcuda.so.1 that sees no device, so that kvikio takes every pointer for host memory.
 *
 * kvikio resolves these names before its first transfer, whatever its settings, and asks one of
 * them what kind of memory a buffer is. The driver's own answer where there is no device is
 * "not initialised", and kvikio goes on from there.
 */

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100 };

int cuInit(unsigned flags) { return NO_DEVICE; }

/* Older than 12.8: kvikio then does not ask for the batched copies that came with it. */
int cuDriverGetVersion(int *version) { *version = 12000; return SUCCESS; }

int cuDeviceGetCount(int *count) { *count = 0; return SUCCESS; }

int cuGetErrorName(int error, const char **name) {
  *name = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_NOT_INITIALIZED";
  return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
  *text = "a stand-in for the driver: no device here";
  return SUCCESS;
}

#define ABSENT(name) int name(void) { return NOT_INITIALIZED; }

ABSENT(cuPointerGetAttribute) ABSENT(cuPointerGetAttributes) ABSENT(cuMemGetAddressRange_v2)
ABSENT(cuMemHostAlloc) ABSENT(cuMemFreeHost)
ABSENT(cuMemHostRegister_v2) ABSENT(cuMemHostUnregister)
ABSENT(cuMemcpyHtoDAsync_v2) ABSENT(cuMemcpyDtoHAsync_v2) ABSENT(cuMemcpyAsync)
ABSENT(cuDeviceGet) ABSENT(cuDeviceGetAttribute)
ABSENT(cuDevicePrimaryCtxRetain) ABSENT(cuDevicePrimaryCtxRelease_v2)
ABSENT(cuCtxCreate_v2) ABSENT(cuCtxCreate_v3) ABSENT(cuCtxCreate_v4) ABSENT(cuCtxDestroy_v2)
ABSENT(cuCtxPushCurrent_v2) ABSENT(cuCtxPopCurrent_v2)
ABSENT(cuCtxGetCurrent) ABSENT(cuCtxGetDevice)
ABSENT(cuStreamCreate) ABSENT(cuStreamDestroy_v2) ABSENT(cuStreamSynchronize)
ABSENT(cuEventCreate) ABSENT(cuEventDestroy_v2) ABSENT(cuEventRecord)
ABSENT(cuEventQuery) ABSENT(cuEventSynchronize)
ABSENT(cuLaunchHostFunc)
