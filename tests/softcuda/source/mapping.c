/* Addresses: reserving, mapping memory to them, granting access. */

#include "softcuda.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define RESERVED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static void *pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

/* mmap aligns to the system's page only: take more and trim both ends. 0: no such addresses. */
static CUdeviceptr reserve(size_t size, size_t alignment, CUdeviceptr hint)
{
    size_t slack = alignment - (size_t)sysconf(_SC_PAGESIZE);
    if (size + slack < size)
        return 0;
    void *start = mmap(pointer(hint), size + slack, PROT_NONE, RESERVED, -1, 0);
    if (start == MAP_FAILED)
        return 0;
    CUdeviceptr first = (CUdeviceptr)(uintptr_t)start;
    CUdeviceptr aligned = (first + alignment - 1) & ~(CUdeviceptr)(alignment - 1);
    if (aligned > first)
        munmap(start, aligned - first);
    if (first + slack > aligned)
        munmap(pointer(aligned + size), first + slack - aligned);
    return aligned;
}

/* An alignment of 0 or below the granularity means the granularity: memory can be mapped at the first address. */
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags)
{
    CUresult result = softcuda_enter(CALL_cuMemAddressReserve);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (result == CUDA_SUCCESS
        && (!address || !size || size % page || hint % page || alignment & (alignment - 1) || flags))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        size_t least = softcuda_settings.granularity;
        CUdeviceptr made = reserve(size, alignment < least ? least : alignment, hint);
        if (made && add_reservation(made, size)) {
            *address = made;
        } else {
            if (made)
                munmap(pointer(made), size);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return softcuda_leave(result);
}

/* Takes a whole reservation in which nothing is mapped. */
CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    CUresult result = softcuda_enter(CALL_cuMemAddressFree);
    struct reservation *found = find_reservation(address, size);
    if (result == CUDA_SUCCESS && (!found || found->start != address || found->size != size || found->count))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && munmap(pointer(address), size))
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (result == CUDA_SUCCESS)
        remove_reservation(found);
    return softcuda_leave(result);
}

/* Maps all of a handle, from its beginning, where nothing is mapped. */
static CUresult map(CUdeviceptr address, size_t size, struct allocation *memory)
{
    struct reservation *reservation = find_reservation(address, size);
    if (!reservation || !memory || memory->size != size || !is_unmapped(reservation, address, size))
        return CUDA_ERROR_INVALID_VALUE;
    if (!add_mapping(reservation, address, memory))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_descriptor(memory),
             (off_t)memory->offset)
        == MAP_FAILED) {
        remove_mappings(reservation, find_mapping(reservation, address), 1);
        return CUDA_ERROR_OUT_OF_MEMORY; /* vm.max_map_count */
    }
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    CUresult result = softcuda_enter(CALL_cuMemMap);
    if (result == CUDA_SUCCESS && (!is_granular(address) || !is_granular(size) || offset || flags))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = map(address, size, find_allocation(handle));
    return softcuda_leave(result);
}

/* The reservation and its mappings that fill a range exactly; NULL: they do not. */
static struct mapping *filling(CUdeviceptr address, size_t size, struct reservation **reservation, size_t *count)
{
    if (!is_granular(address) || !is_granular(size))
        return NULL;
    *reservation = find_reservation(address, size);
    return *reservation ? whole_mappings(*reservation, address, size, count) : NULL;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    CUresult result = softcuda_enter(CALL_cuMemUnmap);
    struct reservation *reservation;
    size_t count;
    struct mapping *first = result == CUDA_SUCCESS ? filling(address, size, &reservation, &count) : NULL;
    if (result == CUDA_SUCCESS && !first)
        result = CUDA_ERROR_INVALID_VALUE;
    /* Back to reserved addresses in one step: no other mmap of the process can slip in between. */
    if (result == CUDA_SUCCESS
        && mmap(pointer(address), size, PROT_NONE, RESERVED | MAP_FIXED, -1, 0) == MAP_FAILED)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (result == CUDA_SUCCESS)
        remove_mappings(reservation, first, count);
    return softcuda_leave(result);
}

static CUresult valid_access(const CUmemAccessDesc *access)
{
    if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (access->location.id != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    switch (access->flags) {
    case CU_MEM_ACCESS_FLAGS_PROT_READ:
        return softcuda_settings.read_only ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
    case CU_MEM_ACCESS_FLAGS_PROT_NONE:
    case CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* The range must be filled by whole mappings. All or nothing. */
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *accesses, size_t access_count)
{
    CUresult result = softcuda_enter(CALL_cuMemSetAccess);
    struct reservation *reservation;
    size_t count;
    struct mapping *first = result == CUDA_SUCCESS ? filling(address, size, &reservation, &count) : NULL;
    if (result == CUDA_SUCCESS && (!accesses || !access_count || !first))
        result = CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; result == CUDA_SUCCESS && i < access_count; i++)
        result = valid_access(&accesses[i]);
    if (result == CUDA_SUCCESS) {
        CUmemAccess_flags access = accesses[access_count - 1].flags;
        int protection = access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
            : access == CU_MEM_ACCESS_FLAGS_PROT_READ                 ? PROT_READ
                                                                      : PROT_NONE;
        if (mprotect(pointer(address), size, protection))
            result = CUDA_ERROR_OUT_OF_MEMORY; /* vm.max_map_count */
        for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
            first[i].access = access;
    }
    return softcuda_leave(result);
}

CUresult cuMemGetAccess(unsigned long long *access, const CUmemLocation *location, CUdeviceptr address)
{
    CUresult result = softcuda_enter(CALL_cuMemGetAccess);
    const struct reservation *reservation = find_reservation(address, 1);
    const struct mapping *mapping = reservation ? find_mapping(reservation, address) : NULL;
    if (result == CUDA_SUCCESS && (!access || !location || !mapping))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS && location->id != 0)
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        *access = mapping->access;
    return softcuda_leave(result);
}
