/* A software CUDA driver: the virtual memory calls of libcuda.so.1 over memfd and mmap.
 *
 *   reservation  [ . . . ▓▓ ▓▓ . ▓▓ . ]   mmap(PROT_NONE), `struct reservation`, sorted by address
 *                        │  │    │
 *   mapping              A  B    A        mmap(MAP_SHARED | MAP_FIXED), sorted within its reservation
 *                        └──┼────┘
 *   allocation           A: a range of one memfd, or a memfd of its own if it can be exported
 *
 * An allocation lives while its handle has references or something maps it. One lock guards everything.
 * Signatures and constants come from NVIDIA's own cuda.h, so a function that differs from it does not compile.
 */

#ifndef SOFTCUDA_H
#define SOFTCUDA_H

#define _GNU_SOURCE

#pragma GCC visibility push(default) /* what cuda.h declares is what the library exports */
#include <cuda.h>
#pragma GCC visibility pop

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* Every function of the library. FAULTY: `softcuda_fail_at` can make it fail. CONTEXT: the thread needs one. */
enum { PLAIN = 0, FAULTY = 1, CONTEXT = 2 };
#define CALLS(X) \
    X(cuGetErrorName, PLAIN) \
    X(cuGetErrorString, PLAIN) \
    X(cuGetProcAddress, PLAIN) \
    X(cuInit, PLAIN) \
    X(cuDriverGetVersion, PLAIN) \
    X(cuDeviceGetCount, PLAIN) \
    X(cuDeviceGet, PLAIN) \
    X(cuDeviceGetName, PLAIN) \
    X(cuDeviceGetAttribute, PLAIN) \
    X(cuDeviceTotalMem, PLAIN) \
    X(cuDevicePrimaryCtxRetain, PLAIN) \
    X(cuDevicePrimaryCtxRelease, PLAIN) \
    X(cuCtxGetCurrent, PLAIN) \
    X(cuCtxSetCurrent, PLAIN) \
    X(cuCtxPushCurrent, PLAIN) \
    X(cuCtxPopCurrent, PLAIN) \
    X(cuCtxGetDevice, CONTEXT) \
    X(cuCtxSynchronize, CONTEXT) \
    X(cuMemGetInfo, CONTEXT) \
    X(cuMemGetAllocationGranularity, PLAIN) \
    X(cuMemAddressReserve, FAULTY | CONTEXT) \
    X(cuMemAddressFree, FAULTY | CONTEXT) \
    X(cuMemCreate, FAULTY | CONTEXT) \
    X(cuMemRelease, FAULTY) \
    X(cuMemRetainAllocationHandle, PLAIN) \
    X(cuMemExportToShareableHandle, FAULTY) \
    X(cuMemImportFromShareableHandle, FAULTY | CONTEXT) \
    X(cuMemMap, FAULTY | CONTEXT) \
    X(cuMemUnmap, FAULTY | CONTEXT) \
    X(cuMemSetAccess, FAULTY | CONTEXT) \
    X(cuMemGetAccess, PLAIN) \
    X(cuPointerGetAttribute, CONTEXT) \
    X(cuPointerGetAttributes, CONTEXT)

#define AS_ID(name, flags) CALL_##name,
enum call { CALLS(AS_ID) CALL_COUNT };
#undef AS_ID

struct allocation {
    CUmemGenericAllocationHandle handle; /* never used twice */
    size_t size;
    int descriptor; /* memfd of its own, or -1: a range of the common one */
    size_t offset;  /* in the common memfd */
    bool imported;  /* not charged: the memory is the exporter's */
    size_t references;
    size_t mappings;
};

struct mapping {
    CUdeviceptr start;
    size_t size;
    unsigned long long access;
    struct allocation *memory;
};

struct reservation {
    CUdeviceptr start;
    size_t size;
    struct mapping *mappings; /* sorted by address */
    size_t count, capacity;
};

struct books {
    struct reservation **reservations; /* sorted by address */
    size_t reservation_count, reservation_capacity;
    struct allocation **allocations; /* sorted by handle */
    size_t allocation_count, allocation_capacity;
    size_t used; /* bytes charged */
};

struct settings {
    size_t granularity;
    size_t memory;
    bool read_only; /* whether read-only access can be granted */
};

/* calls.c: what every entry point begins and ends with, and fault injection. */
CUresult softcuda_enter(enum call call); /* takes the lock; not CUDA_SUCCESS: leave with that */
CUresult softcuda_leave(CUresult result);
extern struct settings softcuda_settings;

/* context.c */
CUresult softcuda_require_context(void);
bool softcuda_is_initialized(void);
CUcontext softcuda_primary_context(void);

/* books.c: what exists. Finding returns NULL when there is none; adding returns false without memory. */
extern struct books softcuda_books;
struct reservation *find_reservation(CUdeviceptr start, size_t size); /* the one that holds the range */
struct reservation *add_reservation(CUdeviceptr start, size_t size);
void remove_reservation(struct reservation *reservation);
struct mapping *find_mapping(const struct reservation *reservation, CUdeviceptr address);
bool is_unmapped(const struct reservation *reservation, CUdeviceptr start, size_t size);
struct mapping *whole_mappings(const struct reservation *reservation, CUdeviceptr start, size_t size, size_t *count);
bool add_mapping(struct reservation *reservation, CUdeviceptr start, struct allocation *memory);
void remove_mappings(struct reservation *reservation, struct mapping *first, size_t count);
struct allocation *find_allocation(CUmemGenericAllocationHandle handle); /* one that has references */
struct allocation *add_allocation(size_t size);
void remove_allocation(struct allocation *allocation);

/* memory.c */
int memory_descriptor(const struct allocation *memory);
void settle(struct allocation *memory); /* give the memory back if nothing holds it any more */

/* Sizes and addresses that the calls accept: positive multiples of the granularity. */
bool is_granular(unsigned long long value);

/* For tests; see tests/softcuda/library.py. */
struct softcuda_usage {
    size_t reservations, allocations, mappings, bytes;
};
EXPORT int softcuda_configure(size_t granularity, size_t memory, int read_only);
EXPORT void softcuda_fail_at(long n, int code, int lasting);
EXPORT void softcuda_pause(int paused);
EXPORT size_t softcuda_failures(void);
EXPORT const char *softcuda_last_failure(void);
EXPORT long softcuda_calls(const char *name);
EXPORT void softcuda_usage(struct softcuda_usage *usage);
EXPORT const char *softcuda_check(void);

#endif
