/* Many threads make random calls, half of them wrong, some made to fail; then everything is given back.
 *
 * Built together with the library, with sanitizers: `stress SEED CALLS`. Ends with 0 if the books balance.
 */

#include "softcuda.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 65536
#define THREADS 4
#define PAGES 16
#define HANDLES 12

static CUcontext context;
static long calls;

static const CUmemAllocationProp shareable = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
};

struct worker {
    unsigned seed;
    CUdeviceptr base;
    CUmemGenericAllocationHandle handles[HANDLES];
};

static unsigned draw(struct worker *w, unsigned limit)
{
    return (unsigned)rand_r(&w->seed) % limit;
}

static void one_call(struct worker *w)
{
    CUmemAllocationProp properties = shareable;
    CUmemAccessDesc access = {.location = shareable.location, .flags = (CUmemAccess_flags)draw(w, 4)};
    CUmemGenericAllocationHandle *handle = &w->handles[draw(w, HANDLES)], other;
    size_t size = (size_t)PAGE * (1 + draw(w, 3)), bytes[2];
    CUdeviceptr at = w->base + (CUdeviceptr)PAGE * draw(w, PAGES) + (draw(w, 9) ? 0 : 4096);
    unsigned long long flags;
    int descriptor;
    properties.requestedHandleTypes = draw(w, 3) ? CU_MEM_HANDLE_TYPE_NONE : shareable.requestedHandleTypes;
    switch (draw(w, 12)) {
    case 0:
    case 1:
        if (!*handle && cuMemCreate(handle, size, &properties, 0) != CUDA_SUCCESS)
            *handle = 0;
        break;
    case 2:
        if (cuMemRelease(*handle) == CUDA_SUCCESS)
            *handle = 0;
        break;
    case 3:
    case 4:
    case 5:
        cuMemMap(at, size, 0, *handle, 0);
        break;
    case 6:
        if (cuMemSetAccess(at, size, &access, 1) == CUDA_SUCCESS && access.flags == 3)
            memset((void *)(uintptr_t)at, 1, size); /* nobody else unmaps here */
        break;
    case 7:
    case 8:
        cuMemUnmap(at, size);
        break;
    case 9:
        if (cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)(at + 5)) == CUDA_SUCCESS)
            while (cuMemRelease(other) != CUDA_SUCCESS) /* may be made to fail */
                ;
        break;
    case 10:
        if (cuMemExportToShareableHandle(&descriptor, *handle, shareable.requestedHandleTypes, 0) == CUDA_SUCCESS) {
            if (cuMemImportFromShareableHandle(&other, (void *)(intptr_t)descriptor, shareable.requestedHandleTypes)
                == CUDA_SUCCESS)
                while (cuMemRelease(other) != CUDA_SUCCESS)
                    ;
            close(descriptor);
        }
        break;
    default:
        cuMemGetAccess(&flags, &shareable.location, at);
        cuMemGetInfo(&bytes[0], &bytes[1]);
        cuMemAddressFree(at, size);
        softcuda_fail_at(draw(w, 40), 0, 0);
    }
}

static void *work(void *argument)
{
    struct worker *w = argument;
    cuCtxSetCurrent(context);
    while (cuMemAddressReserve(&w->base, (size_t)PAGES * PAGE, 0, 0, 0) != CUDA_SUCCESS)
        ;
    for (long i = 0; i < calls; i++)
        one_call(w);
    return NULL;
}

/* After all threads have ended: nothing fails any more. */
static void give_back(struct worker *w)
{
    for (int page = 0; page < PAGES; page++)
        for (int pages = 1; pages <= 3; pages++)
            cuMemUnmap(w->base + (CUdeviceptr)PAGE * (CUdeviceptr)page, (size_t)PAGE * (size_t)pages);
    for (int i = 0; i < HANDLES; i++)
        if (w->handles[i])
            cuMemRelease(w->handles[i]);
    cuMemAddressFree(w->base, (size_t)PAGES * PAGE);
}

int main(int count, char **arguments)
{
    pthread_t threads[THREADS];
    struct worker workers[THREADS] = {0};
    struct softcuda_usage usage;
    unsigned seed = count > 1 ? (unsigned)atoi(arguments[1]) : 0;
    calls = count > 2 ? atol(arguments[2]) : 10000;
    if (softcuda_configure(PAGE, 64 * PAGE, 1) || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0))
        return 1;
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i].seed = seed * THREADS + i;
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    softcuda_fail_at(0, 0, 0);
    cuCtxSetCurrent(context);
    const char *wrong = softcuda_check();
    for (int i = 0; i < THREADS; i++)
        give_back(&workers[i]);
    softcuda_usage(&usage);
    if (!wrong && (usage.reservations || usage.allocations || usage.mappings || usage.bytes))
        wrong = "something was not given back";
    if (!wrong)
        wrong = softcuda_check();
    printf("%ld mapped, %ld unmapped, %zu failures injected: %s\n", softcuda_calls("cuMemMap"),
           softcuda_calls("cuMemUnmap"), softcuda_failures(), wrong ? wrong : "the books balance");
    return wrong != NULL;
}
