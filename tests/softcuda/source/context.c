/* One device, its primary context, and each thread's stack of current contexts. */

#include "softcuda.h"

#include <string.h>

#define STACK 64

struct CUctx_st {
    unsigned retained;
};

static bool initialized;
static struct CUctx_st primary;
static __thread CUcontext stack[STACK];
static __thread int depth;

bool softcuda_is_initialized(void)
{
    return initialized;
}

CUcontext softcuda_primary_context(void)
{
    return &primary;
}

CUresult softcuda_require_context(void)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    return stack[depth - 1]->retained ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult cuInit(unsigned int flags)
{
    CUresult result = softcuda_enter(CALL_cuInit);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_INITIALIZED)
        result = flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        initialized = true;
    return softcuda_leave(result);
}

CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

static CUresult device_call(enum call call, CUdevice device, const void *out)
{
    CUresult result = softcuda_enter(call);
    if (result == CUDA_SUCCESS && device != 0)
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS && !out)
        result = CUDA_ERROR_INVALID_VALUE;
    return result;
}

CUresult cuDeviceGetCount(int *count)
{
    CUresult result = device_call(CALL_cuDeviceGetCount, 0, count);
    if (result == CUDA_SUCCESS)
        *count = 1;
    return softcuda_leave(result);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult result = device_call(CALL_cuDeviceGet, ordinal, device);
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return softcuda_leave(result);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult result = device_call(CALL_cuDeviceGetName, device, name);
    if (result == CUDA_SUCCESS && length < 1)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        strncpy(name, "softcuda", (size_t)length - 1);
        name[length - 1] = '\0';
    }
    return softcuda_leave(result);
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    CUresult result = device_call(CALL_cuDeviceTotalMem, device, bytes);
    if (result == CUDA_SUCCESS)
        *bytes = softcuda_settings.memory;
    return softcuda_leave(result);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CUresult result = device_call(CALL_cuDeviceGetAttribute, device, value);
    if (result == CUDA_SUCCESS && (attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *value = attribute == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            || attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            || attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    return softcuda_leave(result);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = device_call(CALL_cuDevicePrimaryCtxRetain, device, context);
    if (result == CUDA_SUCCESS) {
        primary.retained++;
        *context = &primary;
    }
    return softcuda_leave(result);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    CUresult result = device_call(CALL_cuDevicePrimaryCtxRelease, device, &primary);
    if (result == CUDA_SUCCESS && !primary.retained)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS)
        primary.retained--;
    return softcuda_leave(result);
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    CUresult result = softcuda_enter(CALL_cuCtxGetCurrent);
    if (result == CUDA_SUCCESS && !context)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *context = depth ? stack[depth - 1] : NULL;
    return softcuda_leave(result);
}

/* Replaces the top of the stack; NULL takes it away. */
CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult result = softcuda_enter(CALL_cuCtxSetCurrent);
    if (result == CUDA_SUCCESS && context && context != &primary)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS) {
        if (depth)
            depth--;
        if (context)
            stack[depth++] = context;
    }
    return softcuda_leave(result);
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    CUresult result = softcuda_enter(CALL_cuCtxPushCurrent);
    if (result == CUDA_SUCCESS && context != &primary)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS && depth == STACK)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        stack[depth++] = context;
    return softcuda_leave(result);
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
    CUresult result = softcuda_enter(CALL_cuCtxPopCurrent);
    if (result == CUDA_SUCCESS && !depth)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS) {
        depth--;
        if (context)
            *context = stack[depth];
    }
    return softcuda_leave(result);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    CUresult result = softcuda_enter(CALL_cuCtxGetDevice);
    if (result == CUDA_SUCCESS && !device)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *device = 0;
    return softcuda_leave(result);
}

CUresult cuCtxSynchronize(void)
{
    return softcuda_leave(softcuda_enter(CALL_cuCtxSynchronize)); /* nothing ever runs */
}
