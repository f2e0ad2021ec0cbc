/* Functions by name, which is how cuda.bindings finds them, and errors by number. */

#include "softcuda.h"

#include <string.h>

#define AS_ENTRY(name, flags) {#name, (void (*)(void))name},
static const struct {
    const char *name;
    void (*function)(void);
} functions[] = {CALLS(AS_ENTRY)};

/* Every function exists in one version only, so the version asked for does not matter. */
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status)
{
    (void)version;
    (void)flags;
    if (!symbol || !function)
        return CUDA_ERROR_INVALID_VALUE;
    *function = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, symbol))
            memcpy(function, &functions[i].function, sizeof *function);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#define AS_ERROR(code, text) {code, #code, text}
static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    AS_ERROR(CUDA_SUCCESS, "no error"),
    AS_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    AS_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    AS_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    AS_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    AS_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    AS_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    AS_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    AS_ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    AS_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    AS_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    AS_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    AS_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    AS_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    AS_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    AS_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static int find_error(CUresult code)
{
    for (int i = 0; i < (int)(sizeof errors / sizeof *errors); i++)
        if (errors[i].code == code)
            return i;
    return -1;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    int index = find_error(error);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = index < 0 ? NULL : errors[index].name;
    return index < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    int index = find_error(error);
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = index < 0 ? NULL : errors[index].text;
    return index < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
