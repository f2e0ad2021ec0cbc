/* Physical memory: ranges of one sparse memfd, or a memfd of its own for memory that can be exported.
 *
 * Ranges of the common file are never used twice: offsets are free, and a hole gives the memory back.
 * An exported file ends with a page that says what it is, so that an importer refuses anything else:
 *
 *   | memory ... size bytes | MAGIC, size |
 */

#include "softcuda.h"

#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x736f667463756461ULL /* "softcuda" */

struct trailer {
    uint64_t magic, size;
};

static int common = -1;
static size_t common_end;

int memory_descriptor(const struct allocation *memory)
{
    return memory->descriptor < 0 ? common : memory->descriptor;
}

void settle(struct allocation *memory)
{
    if (memory->references || memory->mappings)
        return;
    if (!memory->imported)
        softcuda_books.used -= memory->size;
    if (memory->descriptor >= 0)
        close(memory->descriptor);
    else
        (void)!fallocate(common, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)memory->offset,
                         (off_t)memory->size);
    remove_allocation(memory);
}

static CUresult valid_properties(const CUmemAllocationProp *properties)
{
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || properties->win32HandleMetaData)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->location.id != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE
        && properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option)
{
    CUresult result = softcuda_enter(CALL_cuMemGetAllocationGranularity);
    if (result == CUDA_SUCCESS)
        result = valid_properties(properties);
    if (result == CUDA_SUCCESS
        && (!granularity
            || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        size_t least = softcuda_settings.granularity, large = 2 << 20;
        *granularity = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || least > large ? least : large;
    }
    return softcuda_leave(result);
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    CUresult result = softcuda_enter(CALL_cuMemGetInfo);
    if (result == CUDA_SUCCESS && (!free_bytes || !total))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *total = softcuda_settings.memory;
        *free_bytes = softcuda_settings.memory - softcuda_books.used;
    }
    return softcuda_leave(result);
}

/* A memfd for memory that can be exported, with its trailer; -1 when there is none to be had. */
static int exportable(size_t size)
{
    struct trailer trailer = {MAGIC, size};
    int made = memfd_create("softcuda-shared", MFD_CLOEXEC);
    if (made >= 0 && pwrite(made, &trailer, sizeof trailer, (off_t)size) != sizeof trailer) {
        close(made);
        return -1;
    }
    return made;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties)
{
    if (size > softcuda_settings.memory - softcuda_books.used)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct allocation *made = add_allocation(size);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool done;
    if (properties->requestedHandleTypes) {
        made->descriptor = exportable(size);
        done = made->descriptor >= 0;
    } else {
        if (common < 0)
            common = memfd_create("softcuda", MFD_CLOEXEC);
        made->offset = common_end;
        done = common >= 0 && !ftruncate(common, (off_t)(common_end + size));
    }
    if (!done) {
        remove_allocation(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (made->descriptor < 0)
        common_end += size;
    softcuda_books.used += size;
    *handle = made->handle;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags)
{
    CUresult result = softcuda_enter(CALL_cuMemCreate);
    if (result == CUDA_SUCCESS)
        result = valid_properties(properties);
    if (result == CUDA_SUCCESS && (!handle || flags || !is_granular(size)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = create(handle, size, properties);
    return softcuda_leave(result);
}

/* CUDA leaves an invalid handle undefined; here it is always caught. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CUresult result = softcuda_enter(CALL_cuMemRelease);
    struct allocation *memory = result == CUDA_SUCCESS ? find_allocation(handle) : NULL;
    if (result == CUDA_SUCCESS && !memory)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        memory->references--;
        settle(memory);
    }
    return softcuda_leave(result);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    CUresult result = softcuda_enter(CALL_cuMemRetainAllocationHandle);
    CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)address;
    const struct reservation *reservation = find_reservation(pointer, 1);
    const struct mapping *mapping = reservation ? find_mapping(reservation, pointer) : NULL;
    if (result == CUDA_SUCCESS && (!handle || !mapping))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        mapping->memory->references++;
        *handle = mapping->memory->handle;
    }
    return softcuda_leave(result);
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
    CUresult result = softcuda_enter(CALL_cuMemExportToShareableHandle);
    if (result == CUDA_SUCCESS && type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        result = CUDA_ERROR_NOT_SUPPORTED;
    const struct allocation *memory = find_allocation(handle);
    if (result == CUDA_SUCCESS && (!shareable || flags || !memory || memory->descriptor < 0))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        int descriptor = fcntl(memory->descriptor, F_DUPFD_CLOEXEC, 0);
        if (descriptor < 0)
            result = CUDA_ERROR_OPERATING_SYSTEM;
        else
            *(int *)shareable = descriptor;
    }
    return softcuda_leave(result);
}

static CUresult import(CUmemGenericAllocationHandle *handle, int descriptor)
{
    struct stat file;
    struct trailer trailer;
    if (fstat(descriptor, &file) || file.st_size < (off_t)sizeof trailer)
        return CUDA_ERROR_INVALID_VALUE;
    off_t size = file.st_size - (off_t)sizeof trailer;
    if (pread(descriptor, &trailer, sizeof trailer, size) != sizeof trailer || trailer.magic != MAGIC
        || trailer.size != (uint64_t)size || !is_granular(trailer.size))
        return CUDA_ERROR_INVALID_VALUE;
    int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    struct allocation *made = copy < 0 ? NULL : add_allocation(trailer.size);
    if (!made) {
        if (copy >= 0)
            close(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->descriptor = copy;
    made->imported = true;
    *handle = made->handle;
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type)
{
    CUresult result = softcuda_enter(CALL_cuMemImportFromShareableHandle);
    if (result == CUDA_SUCCESS && type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS && !handle)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = import(handle, (int)(intptr_t)shareable);
    return softcuda_leave(result);
}
