/* What a pointer points to. */

#include "softcuda.h"

/* Write one attribute, a zero if it has no value here. INVALID_VALUE: the address has no such attribute. */
static CUresult attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
    const struct reservation *range = find_reservation(address, 1);
    const struct mapping *mapping = range ? find_mapping(range, address) : NULL;
    CUresult result = mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = mapping ? softcuda_primary_context() : NULL;
        return result;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = mapping ? CU_MEMORYTYPE_DEVICE : 0;
        return result;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = mapping ? address : 0;
        return result;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: /* device memory: the host is not meant to touch it */
        *(void **)data = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)data = 0;
        return result;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = mapping ? 0 : -2; /* the documented default for an address that is no pointer */
        return result;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = range ? range->start : 0;
        return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = range ? range->size : 0;
        return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = mapping != NULL;
        return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data
            = mapping && mapping->memory->descriptor >= 0 ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
        return result;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(unsigned *)data = mapping ? (unsigned)mapping->access : 0;
        return result;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr address)
{
    CUresult result = softcuda_enter(CALL_cuPointerGetAttribute);
    if (result == CUDA_SUCCESS)
        result = data ? attribute(data, which, address) : CUDA_ERROR_INVALID_VALUE;
    return softcuda_leave(result);
}

/* Unlike the call for one attribute this succeeds for any address: its attributes then are zeros. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address)
{
    CUresult result = softcuda_enter(CALL_cuPointerGetAttributes);
    if (result == CUDA_SUCCESS && (!count || !attributes || !data))
        result = CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; result == CUDA_SUCCESS && i < count; i++) {
        result = data[i] ? attribute(data[i], attributes[i], address) : CUDA_ERROR_INVALID_VALUE;
        if (data[i] && result == CUDA_ERROR_INVALID_VALUE)
            result = CUDA_SUCCESS;
    }
    return softcuda_leave(result);
}
