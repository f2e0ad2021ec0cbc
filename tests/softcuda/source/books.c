/* What exists: reservations by address, mappings within them, allocations by handle. No system calls here. */

#include "softcuda.h"

#include <stdlib.h>
#include <string.h>

struct books softcuda_books;

/* Room for one more item of `width` bytes; false without memory. */
static bool ensure_room(void *items, size_t count, size_t *capacity, size_t width)
{
    void **array = items;
    if (count < *capacity)
        return true;
    size_t larger = *capacity ? *capacity * 2 : 8;
    void *moved = realloc(*array, larger * width);
    if (!moved)
        return false;
    *array = moved;
    *capacity = larger;
    return true;
}

/* Number of reservations that start at or before an address. */
static size_t reservations_up_to(CUdeviceptr address)
{
    size_t low = 0, high = softcuda_books.reservation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (softcuda_books.reservations[middle]->start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct reservation *find_reservation(CUdeviceptr start, size_t size)
{
    size_t index = reservations_up_to(start);
    if (!index)
        return NULL;
    struct reservation *found = softcuda_books.reservations[index - 1];
    CUdeviceptr offset = start - found->start;
    return offset < found->size && size <= found->size - offset ? found : NULL;
}

struct reservation *add_reservation(CUdeviceptr start, size_t size)
{
    struct books *books = &softcuda_books;
    struct reservation *made = calloc(1, sizeof *made);
    if (!made || !ensure_room(&books->reservations, books->reservation_count, &books->reservation_capacity,
                              sizeof *books->reservations)) {
        free(made);
        return NULL;
    }
    made->start = start;
    made->size = size;
    size_t index = reservations_up_to(start);
    struct reservation **place = books->reservations + index;
    memmove(place + 1, place, (books->reservation_count++ - index) * sizeof *place);
    *place = made;
    return made;
}

void remove_reservation(struct reservation *reservation)
{
    size_t index = reservations_up_to(reservation->start) - 1;
    struct reservation **place = softcuda_books.reservations + index;
    memmove(place, place + 1, (--softcuda_books.reservation_count - index) * sizeof *place);
    free(reservation->mappings);
    free(reservation);
}

/* Index of the first mapping that ends behind an address. */
static size_t mapping_index(const struct reservation *reservation, CUdeviceptr address)
{
    size_t low = 0, high = reservation->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (reservation->mappings[middle].start + reservation->mappings[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct mapping *find_mapping(const struct reservation *reservation, CUdeviceptr address)
{
    size_t index = mapping_index(reservation, address);
    bool there = index < reservation->count && reservation->mappings[index].start <= address;
    return there ? &reservation->mappings[index] : NULL;
}

bool is_unmapped(const struct reservation *reservation, CUdeviceptr start, size_t size)
{
    size_t index = mapping_index(reservation, start);
    return index == reservation->count || reservation->mappings[index].start >= start + size;
}

/* The mappings that fill the range exactly: whole ones, without a gap. NULL: it is not filled so. */
struct mapping *whole_mappings(const struct reservation *reservation, CUdeviceptr start, size_t size, size_t *count)
{
    size_t first = mapping_index(reservation, start), index = first;
    CUdeviceptr position = start;
    while (position < start + size) {
        if (index == reservation->count || reservation->mappings[index].start != position)
            return NULL;
        position += reservation->mappings[index++].size;
    }
    if (position != start + size)
        return NULL;
    *count = index - first;
    return &reservation->mappings[first];
}

bool add_mapping(struct reservation *reservation, CUdeviceptr start, struct allocation *memory)
{
    if (!ensure_room(&reservation->mappings, reservation->count, &reservation->capacity,
                     sizeof *reservation->mappings))
        return false;
    size_t index = mapping_index(reservation, start);
    struct mapping *place = reservation->mappings + index;
    memmove(place + 1, place, (reservation->count++ - index) * sizeof *place);
    *place = (struct mapping){start, memory->size, CU_MEM_ACCESS_FLAGS_PROT_NONE, memory};
    memory->mappings++;
    return true;
}

/* Forget neighbouring mappings; memory that nothing holds any more is given back. */
void remove_mappings(struct reservation *reservation, struct mapping *first, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        first[i].memory->mappings--;
        settle(first[i].memory);
    }
    size_t index = (size_t)(first - reservation->mappings);
    reservation->count -= count;
    memmove(first, first + count, (reservation->count - index) * sizeof *first);
}

/* Index of the first allocation whose handle is not less. */
static size_t allocation_index(CUmemGenericAllocationHandle handle)
{
    size_t low = 0, high = softcuda_books.allocation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (softcuda_books.allocations[middle]->handle < handle)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct allocation *find_allocation(CUmemGenericAllocationHandle handle)
{
    size_t index = allocation_index(handle);
    if (index == softcuda_books.allocation_count)
        return NULL;
    struct allocation *found = softcuda_books.allocations[index];
    return found->handle == handle && found->references ? found : NULL;
}

struct allocation *add_allocation(size_t size)
{
    static CUmemGenericAllocationHandle last = 0x50f70000; /* no pointer, no small number */
    struct books *books = &softcuda_books;
    struct allocation *made = calloc(1, sizeof *made);
    if (!made || !ensure_room(&books->allocations, books->allocation_count, &books->allocation_capacity,
                              sizeof *books->allocations)) {
        free(made);
        return NULL;
    }
    made->handle = ++last;
    made->size = size;
    made->descriptor = -1;
    made->references = 1;
    books->allocations[books->allocation_count++] = made;
    return made;
}

void remove_allocation(struct allocation *allocation)
{
    size_t index = allocation_index(allocation->handle);
    struct allocation **place = softcuda_books.allocations + index;
    memmove(place, place + 1, (--softcuda_books.allocation_count - index) * sizeof *place);
    free(allocation);
}
