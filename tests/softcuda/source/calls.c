/* What every call begins and ends with: the lock, counting, injected failures, settings from the environment.
 *
 *   SOFTCUDA_GRANULARITY  bytes of the smallest page, a power of two (2 MiB)
 *   SOFTCUDA_MEMORY       bytes of the device (1 GiB)
 *   SOFTCUDA_READ_ONLY    0: read-only access is refused, as some devices do (1)
 *   SOFTCUDA_FAIL_AT      n[,code]: the n-th call that can fail does, once (never)
 */

#include "softcuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings softcuda_settings = {.granularity = 2 << 20, .memory = 1 << 30, .read_only = true};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long counts[CALL_COUNT];

static struct {
    long countdown; /* calls until one fails; 0: none will */
    CUresult code;  /* CUDA_SUCCESS: what fits the call */
    bool lasting;
    bool paused;
    size_t failures;
    const char *last;
} fault;

#define AS_NAME(name, flags) #name,
static const char *const names[] = {CALLS(AS_NAME)};
#undef AS_NAME
#define AS_FLAGS(name, flags) flags,
static const int flags[] = {CALLS(AS_FLAGS)};
#undef AS_FLAGS

static bool valid_granularity(size_t granularity)
{
    return granularity >= (size_t)sysconf(_SC_PAGESIZE) && !(granularity & (granularity - 1));
}

__attribute__((constructor)) static void read_environment(void)
{
    const char *text = getenv("SOFTCUDA_GRANULARITY");
    if (text && valid_granularity(strtoull(text, NULL, 0)))
        softcuda_settings.granularity = strtoull(text, NULL, 0);
    if ((text = getenv("SOFTCUDA_MEMORY")))
        softcuda_settings.memory = strtoull(text, NULL, 0);
    if ((text = getenv("SOFTCUDA_READ_ONLY")))
        softcuda_settings.read_only = atoi(text) != 0;
    if ((text = getenv("SOFTCUDA_FAIL_AT"))) {
        char *end;
        long n = strtol(text, &end, 10);
        softcuda_fail_at(n, *end == ',' ? atoi(end + 1) : 0, false);
    }
}

static CUresult injected(enum call call)
{
    if (fault.paused || !fault.countdown || (fault.countdown > 1 && fault.countdown--))
        return CUDA_SUCCESS;
    if (!fault.lasting)
        fault.countdown = 0;
    fault.failures++;
    fault.last = names[call];
    if (fault.code != CUDA_SUCCESS)
        return fault.code;
    return call == CALL_cuMemCreate ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

CUresult softcuda_enter(enum call call)
{
    pthread_mutex_lock(&lock);
    counts[call]++;
    if (!softcuda_is_initialized())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = flags[call] & CONTEXT ? softcuda_require_context() : CUDA_SUCCESS;
    return result == CUDA_SUCCESS && flags[call] & FAULTY ? injected(call) : result;
}

CUresult softcuda_leave(CUresult result)
{
    pthread_mutex_unlock(&lock);
    return result;
}

bool is_granular(unsigned long long value)
{
    return value && value % softcuda_settings.granularity == 0;
}

/* Change the device; refused (-1) while anything exists on it. */
int softcuda_configure(size_t granularity, size_t memory, int read_only)
{
    pthread_mutex_lock(&lock);
    bool possible = valid_granularity(granularity) && !softcuda_books.reservation_count
        && !softcuda_books.allocation_count;
    if (possible)
        softcuda_settings = (struct settings){granularity, memory, read_only != 0};
    pthread_mutex_unlock(&lock);
    return possible ? 0 : -1;
}

/* Let the n-th FAULTY call from now fail with `code` (0: what fits the call), or it and all after it.
 * n = 0: let none fail. */
void softcuda_fail_at(long n, int code, int lasting)
{
    pthread_mutex_lock(&lock);
    fault.countdown = n > 0 ? n : 0;
    fault.code = (CUresult)code;
    fault.lasting = lasting;
    pthread_mutex_unlock(&lock);
}

/* While paused nothing is counted and nothing fails: for tests that look at things in between. */
void softcuda_pause(int paused)
{
    pthread_mutex_lock(&lock);
    fault.paused = paused;
    pthread_mutex_unlock(&lock);
}

/* Failures injected so far. */
size_t softcuda_failures(void)
{
    pthread_mutex_lock(&lock);
    size_t failures = fault.failures;
    pthread_mutex_unlock(&lock);
    return failures;
}

/* The call that failed last by injection; NULL: none did. */
const char *softcuda_last_failure(void)
{
    pthread_mutex_lock(&lock);
    const char *last = fault.last;
    pthread_mutex_unlock(&lock);
    return last;
}

/* How often a function was called, refused calls included; -1: there is no such function. Those that only look
 * something up (errors, functions, the version) are not counted. */
long softcuda_calls(const char *name)
{
    long found = -1;
    pthread_mutex_lock(&lock);
    for (int call = 0; call < CALL_COUNT; call++)
        if (!strcmp(names[call], name))
            found = counts[call];
    pthread_mutex_unlock(&lock);
    return found;
}

static const char *check(struct softcuda_usage *usage)
{
    const struct books *books = &softcuda_books;
    *usage = (struct softcuda_usage){books->reservation_count, books->allocation_count, 0, books->used};
    for (size_t i = 0; i < books->reservation_count; i++) {
        const struct reservation *r = books->reservations[i];
        CUdeviceptr end = r->start;
        usage->mappings += r->count;
        for (size_t j = 0; j < r->count; j++) {
            const struct mapping *m = &r->mappings[j];
            if (m->start < end || m->start + m->size > r->start + r->size)
                return "mappings overlap or leave their reservation";
            if (m->size != m->memory->size)
                return "a mapping differs in size from its memory";
            end = m->start + m->size;
        }
        if (i + 1 < books->reservation_count && r->start + r->size > books->reservations[i + 1]->start)
            return "reservations overlap";
    }
    size_t charged = 0, mappings = 0;
    for (size_t i = 0; i < books->allocation_count; i++) {
        const struct allocation *a = books->allocations[i];
        charged += a->imported ? 0 : a->size;
        mappings += a->mappings;
        if (!a->references && !a->mappings)
            return "memory that nothing holds is still there";
        if (i && books->allocations[i - 1]->handle >= a->handle)
            return "handles out of order";
    }
    if (mappings != usage->mappings)
        return "mappings miscounted";
    return charged != books->used || charged > softcuda_settings.memory ? "bytes miscounted" : NULL;
}

/* What exists at this moment. */
void softcuda_usage(struct softcuda_usage *usage)
{
    pthread_mutex_lock(&lock);
    check(usage);
    pthread_mutex_unlock(&lock);
}

/* Recount everything; NULL, or what is wrong. */
const char *softcuda_check(void)
{
    struct softcuda_usage usage;
    pthread_mutex_lock(&lock);
    const char *wrong = check(&usage);
    pthread_mutex_unlock(&lock);
    return wrong;
}
