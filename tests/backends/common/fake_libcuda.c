// A libcuda.so.1 without a GPU. It records what cuLaunchKernelEx and cuTensorMapEncodeTiled get.

#define cuTensorMapEncodeTiled their_cuTensorMapEncodeTiled
#define cuTensorMapEncodeIm2col their_cuTensorMapEncodeIm2col
#include "cuda.h"
#undef cuTensorMapEncodeTiled
#undef cuTensorMapEncodeIm2col
#include <string.h>

static unsigned num_parameters, sizes[512];
static int failures, driver_version = 12080;
CUcontext current = (CUcontext)1;

struct {
  unsigned launches, grid[3], block[3], shared, num_attributes, first_attribute, first_value, nbytes;
  unsigned long long stream, function;
  unsigned char values[8192];
} recorded;

struct {
  unsigned long long address, shape[5], strides[5];
  unsigned block[5], steps[5], type, rank, interleave, swizzle, promotion, fill, padding[3];
} encoded;

void fake_parameters(unsigned count, const unsigned *bytes) {
  num_parameters = count;
  memcpy(sizes, bytes, count * sizeof(unsigned));
}

void fake_failures(int count) { failures = count; }

void fake_driver_version(int version) { driver_version = version; }

void fake_context(unsigned long long context) { current = (CUcontext)context; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (!current)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (failures > 0) {
    --failures;
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  }
  unsigned launches = recorded.launches + 1;
  memset(&recorded, 0, sizeof(recorded));
  recorded.launches = launches;
  unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  memcpy(recorded.grid, grid, sizeof(grid));
  memcpy(recorded.block, block, sizeof(block));
  recorded.shared = config->sharedMemBytes;
  recorded.stream = (unsigned long long)config->hStream;
  recorded.function = (unsigned long long)function;
  recorded.num_attributes = config->numAttrs;
  if (config->numAttrs > 0) {
    recorded.first_attribute = config->attrs[0].id;
    recorded.first_value = config->attrs[0].value.programmaticStreamSerializationAllowed;
  }
  for (unsigned i = 0; i < num_parameters; ++i) {
    memcpy(recorded.values + recorded.nbytes, parameters[i], sizes[i]);
    recorded.nbytes += sizes[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, int type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *block,
                                const cuuint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  if (!current)
    return CUDA_ERROR_INVALID_CONTEXT;
  if ((unsigned long long)map % 64)
    return CUDA_ERROR_INVALID_VALUE;
  memset(&encoded, 0, sizeof(encoded));
  encoded.address = (unsigned long long)address;
  encoded.type = type;
  encoded.rank = rank;
  memcpy(encoded.shape, shape, rank * sizeof(cuuint64_t));
  memcpy(encoded.strides, strides, (rank - 1) * sizeof(cuuint64_t));
  memcpy(encoded.block, block, rank * sizeof(cuuint32_t));
  memcpy(encoded.steps, steps, rank * sizeof(cuuint32_t));
  encoded.interleave = interleave;
  encoded.swizzle = swizzle;
  encoded.promotion = promotion;
  encoded.fill = fill;
  // All that is given, folded into the bytes of the descriptor, whose bit 85 is set.
  memset(map, 0, sizeof(*map));
  unsigned char *bytes = (unsigned char *)&encoded;
  for (unsigned i = 0; i < sizeof(encoded); ++i)
    ((unsigned char *)map)[i % 128] = ((unsigned char *)map)[i % 128] * 31 + bytes[i];
  ((unsigned long long *)map)[1] |= 1ull << 21;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(void) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuGetErrorString(CUresult result, const char **text) {
  *text = result == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES ? "too many resources requested for launch" : "fake";
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(unsigned long long)(device + 100);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  return config == CU_FUNC_CACHE_PREFER_SHARED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)2;
  return memcmp(image, "\177ELF", 4) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x123456789ull;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = driver_version;
  return CUDA_SUCCESS;
}

// What Triton's module is linked with, and does not call here.
CUresult cuCtxGetDevice(CUdevice *device) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute name, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return CUDA_ERROR_NOT_SUPPORTED; }
