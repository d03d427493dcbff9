/* A cache of the memory of large blocks: what is freed is used again, moved to where it is needed, and given back last.
 *
 * One region of addresses is reserved. A block is a run of pages in it; free pages lie in runs, too. The region is divided
 * into chunks of 2 MiB, the size of a huge page. A chunk *has pages* once something was written there. One that has pages
 * and no block is *idle*. Idle chunks are in a list, those that have been idle for longest first. A block that needs
 * pages takes those of idle chunks, which mremap(2) moves to its place in 5 microseconds a chunk. Only when there is no
 * idle chunk does it take fresh pages, which the kernel has to clear; before that, the room is looked at (room.h).
 *
 * So addresses are plenty and may be scattered; what is scarce is chunks without blocks. A run is chosen in which the
 * block touches the fewest idle chunks.
 *
 * NOTE [Near the limit]
 * While room is short, or less of it is left than is idle, idle chunks are also given to MADV_FREE. Others (the store's
 * slab, libraries, the interpreter) who need pages then get those from the kernel, at once, and without a call of the
 * cache. A chunk that is used again first has lost nothing. If a block finds neither idle chunks nor room, free pages
 * within chunks that have blocks are given back, too. If that is not enough, glibc gives back what it keeps of smaller
 * blocks, and of all that were freed before the cache began.
 *
 * Blocks are at least LEAST_BYTES; who asks for less, or finds no room in the region, gets NULL and goes elsewhere. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include "cache_blocks.h"
#include "room.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* Linux 5.7 */
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif

#define PAGE_BYTES ((size_t)4096)
#define CHUNK_BYTES ((size_t)2 << 20)
#define CHUNK_PAGES ((uint32_t)512)
#define LEAST_BYTES ((size_t)256 << 10)
#define NONE UINT32_MAX

/* The two ends of a run: what begins or ends there, and how many pages it has. Pages between them say nothing. */
enum { KIND = 3u << 30, BLOCK = 1u << 30, FREE_START = 2u << 30, FREE_END = 3u << 30 };
enum { HAS_PAGES = 1, IS_LAZY = 2, WAS_MOVED = 4, IS_APART = 8, HAS_HOLES = 16 }; /* apart: in a mapping of its own */

typedef struct {
    uint32_t end, next, previous; /* the latter two of a free run's start: its neighbours in the list of its size */
} Page;

typedef struct {
    uint32_t next, previous; /* in the list of idle chunks */
    uint16_t used_pages;
    uint8_t flags;
} Chunk;

enum { SIZES_PER_POWER = 8, NUM_SIZES = 31 * SIZES_PER_POWER, MOST_TRIED = 32 };

typedef struct {
    pthread_mutex_t lock;
    uint8_t *region;
    uint32_t num_pages, ready_pages; /* in all; those that may be written to, all at the start */
    Page *pages;
    Chunk *chunks;
    uint32_t lists[NUM_SIZES];
    uint64_t has_runs[(NUM_SIZES + 63) / 64];
    uint32_t oldest, newest; /* idle chunks */
    uint32_t num_idle, num_moved, most_moved;
    Keeping keeping;
    uint32_t idle_budget;
    uint64_t most_kept_bytes; /* of idle chunks, before they are freed lazily */
    int64_t allowance; /* fresh bytes that may be taken before the room is looked at again */
    struct timespec looked_at;
    int64_t trims_from; /* nanoseconds of CLOCK_MONOTONIC: until then the heaps rest */
    Limits limits;
    CacheFigures figures;
} Cache;

static Cache cache = {.lock = PTHREAD_MUTEX_INITIALIZER, .keeping = WITHIN_ROOM, .most_kept_bytes = UINT64_MAX};

static uint8_t *address_of(uint32_t page) { return cache.region + (size_t)page * PAGE_BYTES; }

/* --- free runs, by size ------------------------------------------------------------------------------------------ */

static unsigned size_class(uint32_t num_pages)
{
    unsigned power = 31 - (unsigned)__builtin_clz(num_pages);
    unsigned part = power < 3 ? 0 : (num_pages >> (power - 3)) & (SIZES_PER_POWER - 1);
    return power * SIZES_PER_POWER + part;
}

static void list_run(uint32_t start, uint32_t num_pages)
{
    unsigned class = size_class(num_pages);
    Page *pages = cache.pages;
    pages[start + num_pages - 1].end = FREE_END | num_pages;
    pages[start] = (Page){FREE_START | num_pages, cache.lists[class], NONE}; /* last: it may be the only page */
    if (cache.lists[class] != NONE)
        pages[cache.lists[class]].previous = start;
    cache.lists[class] = start;
    cache.has_runs[class / 64] |= 1ull << class % 64;
}

static uint32_t length_of(uint32_t start) { return cache.pages[start].end & ~KIND; }

static void unlist_run(uint32_t start)
{
    Page *pages = cache.pages, run = pages[start];
    unsigned class = size_class(run.end & ~KIND);
    if (run.next != NONE)
        pages[run.next].previous = run.previous;
    if (run.previous != NONE)
        pages[run.previous].next = run.next;
    else if ((cache.lists[class] = run.next) == NONE)
        cache.has_runs[class / 64] &= ~(1ull << class % 64);
}

/* How many idle or empty chunks a block there would begin to use. */
static uint32_t opened_by(uint32_t start, uint32_t num_pages)
{
    uint32_t first = start / CHUNK_PAGES, last = (start + num_pages - 1) / CHUNK_PAGES;
    uint32_t opened = last - first + 1 - (cache.chunks[first].used_pages > 0);
    return opened - (last > first && cache.chunks[last].used_pages > 0);
}

typedef struct {
    uint32_t run, start, opened, length;
} Place;

static void consider(Place *best, uint32_t run, uint32_t start, uint32_t num_pages)
{
    uint32_t opened = opened_by(start, num_pages), length = length_of(run);
    bool is_better = opened != best->opened ? opened < best->opened
                     : length != best->length ? length < best->length
                                              : start < best->start;
    if (is_better)
        *best = (Place){run, start, opened, length};
}

static Place find_place(uint32_t num_pages)
{
    Place best = {NONE, NONE, UINT32_MAX, UINT32_MAX};
    unsigned class = size_class(num_pages);
    for (int num_classes = 0; num_classes < 2 && class < NUM_SIZES; class++) {
        uint64_t word = cache.has_runs[class / 64] >> class % 64;
        if (!word) {
            class |= 63;
            continue;
        }
        class += (unsigned)__builtin_ctzll(word);
        int num_tried = 0;
        bool fits = false;
        for (uint32_t run = cache.lists[class]; run != NONE && num_tried < MOST_TRIED; run = cache.pages[run].next) {
            uint32_t length = length_of(run);
            num_tried++;
            if (length < num_pages)
                continue;
            fits = true;
            consider(&best, run, run, num_pages);
            if (run + length <= cache.ready_pages)
                consider(&best, run, run + length - num_pages, num_pages);
        }
        num_classes += fits;
    }
    return best;
}

/* --- idle chunks -------------------------------------------------------------------------------------------------- */

static void list_idle(uint32_t chunk)
{
    cache.chunks[chunk].next = NONE;
    cache.chunks[chunk].previous = cache.newest;
    if (cache.newest != NONE)
        cache.chunks[cache.newest].next = chunk;
    else
        cache.oldest = chunk;
    cache.newest = chunk;
    cache.num_idle++;
}

static void unlist_idle(uint32_t number)
{
    Chunk *chunk = &cache.chunks[number];
    if (chunk->previous != NONE)
        cache.chunks[chunk->previous].next = chunk->next;
    else
        cache.oldest = chunk->next;
    if (chunk->next != NONE)
        cache.chunks[chunk->next].previous = chunk->previous;
    else
        cache.newest = chunk->previous;
    cache.num_idle--;
    if (chunk->flags & IS_LAZY)
        cache.figures.lazy_bytes -= CHUNK_BYTES;
    chunk->flags &= (uint8_t)~IS_LAZY;
}

/* How many of the oldest idle chunks lie side by side, in the order of the list, and in one mapping. */
static uint32_t oldest_together(uint32_t most)
{
    uint32_t num = 0, chunk = cache.oldest;
    while (num < most && chunk != NONE && chunk == cache.oldest + num && !(cache.chunks[chunk].flags & IS_APART)) {
        num++;
        chunk = cache.chunks[chunk].next;
    }
    return num ? num : 1;
}

/* A chunk that was moved is mapped anew: its mapping would never join its neighbours'. */
static void return_pages(uint32_t first, uint32_t num)
{
    uint8_t *start = address_of(first * CHUNK_PAGES);
    Chunk *chunk = &cache.chunks[first];
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (chunk->flags & WAS_MOVED && mmap(start, CHUNK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0) == start) {
        madvise(start, CHUNK_BYTES, MADV_HUGEPAGE);
        chunk->flags &= (uint8_t)~WAS_MOVED;
        cache.num_moved--;
    } else
        madvise(start, num * CHUNK_BYTES, MADV_DONTNEED);
    for (uint32_t i = 0; i < num; i++)
        chunk[i].flags &= (uint8_t)~HAS_PAGES;
    cache.figures.returned_bytes += num * CHUNK_BYTES;
}

static void return_oldest(uint32_t num)
{
    while (num && cache.oldest != NONE) {
        uint32_t first = cache.oldest, together = oldest_together(num);
        for (uint32_t chunk = first; chunk < first + together; chunk++)
            unlist_idle(chunk);
        return_pages(first, together);
        num -= together;
    }
}

static void free_lazily(void)
{
    for (uint32_t chunk = cache.newest; chunk != NONE; chunk = cache.chunks[chunk].previous) {
        if (cache.chunks[chunk].flags & IS_LAZY)
            break; /* and so are all that are older */
        if (madvise(address_of(chunk * CHUNK_PAGES), CHUNK_BYTES, MADV_FREE))
            break;
        cache.chunks[chunk].flags |= IS_LAZY;
        cache.figures.lazy_bytes += CHUNK_BYTES;
    }
}

/* After mremap has failed: whether the target can still be written to. It may have been unmapped before, and somebody
 * else may have got its addresses meanwhile. */
static bool is_still_mapped(void *target, size_t num_bytes)
{
    unsigned char seen[1];
    if (!mincore(target, PAGE_BYTES, seen) || errno != ENOMEM)
        return true;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    return mmap(target, num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == target;
}

/* Gives `num` chunks from `first` on the pages of the oldest idle chunks, as far as there are some. Returns how many have
 * got pages; NONE: addresses were lost, and no block may be there, ever. */
static uint32_t move_oldest(uint32_t first, uint32_t num)
{
    uint32_t num_done = 0;
    while (num_done < num && cache.oldest != NONE && cache.num_moved < cache.most_moved) {
        uint32_t source = cache.oldest, target = first + num_done, together = oldest_together(num - num_done);
        void *from = address_of(source * CHUNK_PAGES), *to = address_of(target * CHUNK_PAGES);
        size_t num_bytes = together * CHUNK_BYTES;
        if (mremap(from, num_bytes, num_bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != to) {
            cache.most_moved = 0; /* Linux before 5.7, or out of mappings: never again */
            return is_still_mapped(to, num_bytes) ? num_done : NONE;
        }
        for (uint32_t i = 0; i < together; i++) {
            Chunk *chunk = &cache.chunks[target + i];
            unlist_idle(source + i);
            cache.chunks[source + i].flags &= (uint8_t)~HAS_PAGES;
            cache.num_moved += !(chunk->flags & WAS_MOVED);
            chunk->flags |= HAS_PAGES | WAS_MOVED | IS_APART;
        }
        cache.figures.moved_bytes += num_bytes;
        num_done += together;
    }
    return num_done;
}

/* Gives back free pages beside blocks: the last resort. */
static void return_holes(void)
{
    for (unsigned class = 0; class < NUM_SIZES; class++)
        for (uint32_t run = cache.lists[class]; run != NONE; run = cache.pages[run].next) {
            uint32_t end = run + length_of(run), first = run / CHUNK_PAGES, last = (end - 1) / CHUNK_PAGES;
            for (uint32_t number = first;; number = last) {
                Chunk *chunk = &cache.chunks[number];
                uint32_t from = number == first ? run : number * CHUNK_PAGES;
                uint32_t to = end < (number + 1) * CHUNK_PAGES ? end : (number + 1) * CHUNK_PAGES;
                if (chunk->used_pages && !(chunk->flags & HAS_HOLES) && to - from >= 16) {
                    madvise(address_of(from), (to - from) * PAGE_BYTES, MADV_DONTNEED);
                    cache.figures.returned_bytes += (to - from) * PAGE_BYTES;
                }
                if (number == last)
                    break;
            }
        }
    for (uint32_t number = 0; number < cache.ready_pages / CHUNK_PAGES; number++)
        cache.chunks[number].flags |= HAS_HOLES;
}

/* --- the limit ---------------------------------------------------------------------------------------------------- */

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Has glibc give back what it keeps. Then it rests for four times as long as that took, as its pages are taken anew. */
static void trim_heaps(void)
{
#ifdef __GLIBC__
    int64_t began = nanoseconds();
    if (began < cache.trims_from)
        return;
    malloc_trim(0);
    int64_t ended = nanoseconds();
    cache.trims_from = ended + 4 * (ended - began);
#endif
}

static bool is_out_of_date(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return now.tv_sec != cache.looked_at.tv_sec || now.tv_nsec - cache.looked_at.tv_nsec > 20000000;
}

static bool is_much_idle(void) { return cache.num_idle * (uint64_t)CHUNK_BYTES > cache.most_kept_bytes; }

/* Looks at the room, and gives back what is missing of `num_bytes` beside the reserve, as far as there is something. */
static void look(int64_t num_bytes)
{
    Room room = find_room(&cache.limits);
    int64_t left = room.left - room.reserve;
    cache.figures.num_looks++;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &cache.looked_at);
    bool is_short = left < room.reserve;
    cache.most_kept_bytes = room.is_own ? UINT64_MAX : is_short ? 0 : (uint64_t)left;
    cache.allowance = is_short ? 0 : (left - room.reserve) / 4;
    int64_t missing = num_bytes - left - (room.is_own ? 0 : (int64_t)cache.figures.lazy_bytes);
    if (missing > 0 && cache.num_idle) {
        uint32_t num = (uint32_t)((missing + (int64_t)CHUNK_BYTES - 1) / (int64_t)CHUNK_BYTES);
        missing -= (int64_t)(num < cache.num_idle ? num : cache.num_idle) * (int64_t)CHUNK_BYTES;
        return_oldest(num);
    }
    if (missing > 0) {
        uint64_t returned_before = cache.figures.returned_bytes;
        return_holes();
        if (missing > (int64_t)(cache.figures.returned_bytes - returned_before))
            trim_heaps();
    }
    if (is_much_idle())
        free_lazily();
}

/* Before that many fresh bytes are taken. */
static void make_room(int64_t num_bytes)
{
    if (cache.keeping == KEEP_ALL)
        return;
    if (cache.allowance >= num_bytes && !is_out_of_date())
        cache.allowance -= num_bytes;
    else
        look(num_bytes);
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

/* False: it lies over addresses that were lost. */
static bool use_chunks(uint32_t start, uint32_t num_pages)
{
    uint32_t first = start / CHUNK_PAGES, last = (start + num_pages - 1) / CHUNK_PAGES, num_fresh = 0;
    for (uint32_t number = first; number <= last; number++) {
        Chunk *chunk = &cache.chunks[number];
        uint32_t from = number == first ? start % CHUNK_PAGES : 0;
        uint32_t to = number == last ? (start + num_pages - 1) % CHUNK_PAGES + 1 : CHUNK_PAGES;
        if (!chunk->used_pages && chunk->flags & HAS_PAGES)
            unlist_idle(number); /* before others' are taken */
        chunk->used_pages = (uint16_t)(chunk->used_pages + (to - from));
        chunk->flags &= (uint8_t)~HAS_HOLES;
    }
    for (uint32_t number = first; number <= last; number++) {
        uint32_t num = 0;
        while (number + num <= last && !(cache.chunks[number + num].flags & HAS_PAGES))
            num++;
        uint32_t num_moved = num ? move_oldest(number, num) : 0;
        if (num_moved == NONE)
            return false;
        for (uint32_t i = num_moved; i < num; i++)
            cache.chunks[number + i].flags |= HAS_PAGES;
        num_fresh += num - num_moved;
        number += num;
    }
    if (num_fresh) {
        return_oldest(num_fresh); /* those that could not be moved: they are not to be kept beside fresh ones */
        cache.figures.fresh_bytes += num_fresh * CHUNK_BYTES;
        make_room((int64_t)num_fresh * (int64_t)CHUNK_BYTES);
    }
    return true;
}

static bool make_ready(uint32_t end)
{
    if (end <= cache.ready_pages)
        return true;
    uint32_t step = 32 * CHUNK_PAGES, ready = (end + step - 1) / step * step;
    if (ready > cache.num_pages)
        ready = cache.num_pages;
    size_t num_bytes = (ready - cache.ready_pages) * PAGE_BYTES;
    if (mprotect(address_of(cache.ready_pages), num_bytes, PROT_READ | PROT_WRITE))
        return false;
    cache.ready_pages = ready;
    return true;
}

void *tierstore_cache_allocate(size_t num_bytes)
{
    if (num_bytes < LEAST_BYTES || !cache.region || num_bytes > cache.num_pages * PAGE_BYTES)
        return NULL;
    uint32_t num_pages = (uint32_t)((num_bytes + PAGE_BYTES - 1) / PAGE_BYTES);
    void *block = NULL;
    pthread_mutex_lock(&cache.lock);
    Place place = find_place(num_pages);
    if (place.run != NONE && make_ready(place.start + num_pages)) {
        uint32_t end = place.run + place.length, block_end = place.start + num_pages;
        unlist_run(place.run);
        if (place.start > place.run)
            list_run(place.run, place.start - place.run);
        if (block_end < end)
            list_run(block_end, end - block_end);
        cache.pages[block_end - 1].end = 0;
        cache.pages[place.start].end = BLOCK | num_pages;
        cache.figures.used_bytes += num_pages * PAGE_BYTES;
        block = use_chunks(place.start, num_pages) ? address_of(place.start) : NULL;
    }
    pthread_mutex_unlock(&cache.lock);
    return block;
}

bool tierstore_cache_owns(const void *block)
{
    return cache.region && (size_t)((const uint8_t *)block - cache.region) < cache.num_pages * PAGE_BYTES;
}

size_t tierstore_cache_size_of(const void *block)
{
    return (cache.pages[(size_t)((const uint8_t *)block - cache.region) / PAGE_BYTES].end & ~KIND) * PAGE_BYTES;
}

void tierstore_cache_free(void *block)
{
    uint32_t start = (uint32_t)((size_t)((uint8_t *)block - cache.region) / PAGE_BYTES);
    pthread_mutex_lock(&cache.lock);
    Page *pages = cache.pages;
    if ((pages[start].end & KIND) != BLOCK)
        abort(); /* freed twice, or no block: the next two would get the same bytes */
    uint32_t num_pages = length_of(start), first = start / CHUNK_PAGES, last = (start + num_pages - 1) / CHUNK_PAGES;
    cache.figures.used_bytes -= num_pages * PAGE_BYTES;
    for (uint32_t number = first; number <= last; number++) {
        Chunk *chunk = &cache.chunks[number];
        uint32_t from = number == first ? start % CHUNK_PAGES : 0;
        uint32_t to = number == last ? (start + num_pages - 1) % CHUNK_PAGES + 1 : CHUNK_PAGES;
        chunk->used_pages = (uint16_t)(chunk->used_pages - (to - from));
        chunk->flags &= (uint8_t)~HAS_HOLES;
        if (!chunk->used_pages)
            list_idle(number);
    }
    pages[start].end = 0; /* if it joins the run before it, nothing begins here any more */
    uint32_t end = start + num_pages;
    if (end < cache.num_pages && (pages[end].end & KIND) == FREE_START) {
        num_pages += length_of(end);
        unlist_run(end);
    }
    if (start) {
        uint32_t before = pages[start - 1].end, kind = before & KIND;
        if (kind == FREE_END || (kind == FREE_START && (before & ~KIND) == 1)) {
            start -= before & ~KIND;
            num_pages += before & ~KIND;
            unlist_run(start);
        }
    }
    list_run(start, num_pages);
    if (cache.num_idle && cache.keeping != KEEP_ALL && is_out_of_date())
        look(0);
    if (cache.keeping == WITHIN_BUDGET && cache.num_idle > cache.idle_budget)
        return_oldest(cache.num_idle - cache.idle_budget);
    else if (is_much_idle() && cache.keeping != KEEP_ALL)
        free_lazily();
    pthread_mutex_unlock(&cache.lock);
}

/* --- the process -------------------------------------------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&cache.lock); }
static void in_parent(void) { pthread_mutex_unlock(&cache.lock); }

/* Idle chunks would be shared with the parent, and copied as soon as either writes to them. */
static void in_child(void)
{
    pthread_mutex_init(&cache.lock, NULL);
    return_oldest(cache.num_idle);
}

/* As early as can be: handlers of others that were there before run while the lock is held, and they may allocate. */
static int fork_error;
__attribute__((constructor)) static void watch_forks(void) { fork_error = pthread_atfork(before_fork, in_parent, in_child); }

static void *reserved(size_t num_bytes, int protection)
{
    void *found = mmap(NULL, num_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

/* Bytes of addresses to reserve: four times the memory of the machine, but half of what `ulimit -v` leaves. */
static size_t region_bytes(void)
{
    char text[256];
    struct rlimit limit;
    size_t num_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * PAGE_BYTES * 4;
    if (!getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur != RLIM_INFINITY && read_file("/proc/self", "statm", text, sizeof text)) {
        size_t mapped = strtoull(text, NULL, 10) * PAGE_BYTES, left = limit.rlim_cur > mapped ? limit.rlim_cur - mapped : 0;
        num_bytes = num_bytes < left / 2 ? num_bytes : left / 2;
    }
    size_t most = (size_t)1 << 41;
    return (num_bytes < most ? num_bytes : most) / CHUNK_BYTES * CHUNK_BYTES;
}

/* By mlockall(2), MCL_FUTURE: what is reserved would have all its pages at once, and keep them. */
static bool is_new_memory_locked(void)
{
    unsigned char has_page = 0;
    void *page = reserved(PAGE_BYTES, PROT_READ | PROT_WRITE);
    if (page) {
        mincore(page, PAGE_BYTES, &has_page);
        munmap(page, PAGE_BYTES);
    }
    return has_page & 1;
}

static int open_error;

static void begin(void)
{
    size_t num_bytes = region_bytes(), num_pages = num_bytes / PAGE_BYTES;
    open_error = sysconf(_SC_PAGE_SIZE) != (long)PAGE_BYTES || is_new_memory_locked() ? ENOTSUP : ENOMEM;
    if (num_bytes < 64 * CHUNK_BYTES || open_error == ENOTSUP)
        return;
    uint8_t *region = reserved(num_bytes + CHUNK_BYTES, PROT_NONE);
    Page *pages = reserved(num_pages * sizeof(Page), PROT_READ | PROT_WRITE);
    Chunk *chunks = reserved(num_bytes / CHUNK_BYTES * sizeof(Chunk), PROT_READ | PROT_WRITE);
    if (!region || !pages || !chunks)
        return; /* what was reserved stays so: it costs nothing */
    region += CHUNK_BYTES - (uintptr_t)region % CHUNK_BYTES;
    madvise(region, num_bytes, MADV_HUGEPAGE);
    for (int class = 0; class < NUM_SIZES; class++)
        cache.lists[class] = NONE;
    cache.oldest = cache.newest = NONE;
    char text[64];
    long most_mappings = read_file("/proc/sys/vm", "max_map_count", text, sizeof text) ? strtol(text, NULL, 10) : 65530;
    cache.most_moved = (uint32_t)(most_mappings / 4);
    cache.pages = pages;
    cache.chunks = chunks;
    cache.num_pages = (uint32_t)num_pages;
    list_run(0, (uint32_t)num_pages);
    open_error = fork_error;
    if (!open_error)
        __atomic_store_n(&cache.region, region, __ATOMIC_RELEASE); /* last: by it others see that blocks are served */
}

int tierstore_cache_open(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int error = pthread_once(&once, begin);
    return error ? error : open_error;
}

/* --- what the store calls ----------------------------------------------------------------------------------------- */

void tierstore_cache_keep(Keeping keeping, uint64_t budget_bytes, uint64_t own_limit_bytes)
{
    pthread_mutex_lock(&cache.lock);
    cache.keeping = keeping;
    cache.idle_budget = (uint32_t)(budget_bytes / CHUNK_BYTES);
    cache.limits.own_limit = (int64_t)own_limit_bytes;
    cache.allowance = 0;
    cache.most_kept_bytes = UINT64_MAX;
    pthread_mutex_unlock(&cache.lock);
}

void tierstore_cache_respect(const char *folder, int version)
{
    pthread_mutex_lock(&cache.lock);
    Limits *limits = &cache.limits;
    if (!folder)
        limits->num_groups = 0;
    else if (limits->num_groups < MOST_GROUPS && (version == 1 || version == 2)) {
        Group *group = &limits->groups[limits->num_groups];
        group->version = version;
        size_t length = (size_t)snprintf(group->folder, sizeof group->folder, "%s", folder);
        limits->num_groups += length < sizeof group->folder;
    }
    cache.allowance = 0;
    pthread_mutex_unlock(&cache.lock);
}

void tierstore_cache_make_room(uint64_t num_bytes)
{
    pthread_mutex_lock(&cache.lock);
    cache.allowance = 0;
    if (cache.region)
        make_room((int64_t)num_bytes);
    pthread_mutex_unlock(&cache.lock);
}

void tierstore_cache_return_all(void)
{
    pthread_mutex_lock(&cache.lock);
    return_oldest(cache.num_idle);
    pthread_mutex_unlock(&cache.lock);
}

void tierstore_cache_read(CacheFigures *figures)
{
    pthread_mutex_lock(&cache.lock);
    *figures = cache.figures;
    figures->idle_bytes = cache.num_idle * CHUNK_BYTES;
    pthread_mutex_unlock(&cache.lock);
}
