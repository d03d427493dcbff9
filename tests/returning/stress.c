/* Random allocations on the cache of `native/` by several threads, while its modes change and the process forks.
 *
 * The arguments: steps of each thread, the seed, and a folder like that of a memory cgroup (version 2). Every page of a block is written when it is made, and looked at before
 * the block is freed, by whichever thread does that. A block of another, or addresses that cannot be written to, end it. */

#define _GNU_SOURCE
#include <sys/mman.h>
#ifdef BEFORE_LINUX_5_7
#undef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 8 /* no kernel knows it: EINVAL */
#endif
#include "chunk_cache.c"

#include <sys/wait.h>

enum { NUM_THREADS = 4, NUM_SHARED = 24 };

typedef struct {
    uint8_t *block;
    size_t num_bytes;
    uint64_t mark;
} Held;

static Held shared[NUM_SHARED]; /* made by one thread, freed by any */
static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned num_steps;

static uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    _exit(4);
}

static Held make(uint64_t *state)
{
    /* small ones are more frequent: as many in each octave; some end at a page, some just beside one */
    size_t num_bytes = LEAST_BYTES << draw(state) % 8;
    num_bytes += draw(state) % num_bytes & ~(PAGE_BYTES - 1);
    num_bytes = num_bytes + draw(state) % 3 - 1;
    Held held = {tierstore_cache_allocate(num_bytes), num_bytes, draw(state)};
    if (!held.block != (num_bytes < LEAST_BYTES))
        fail("a block that should have been served was not, or the other way round");
    if (held.block && tierstore_cache_size_of(held.block) < num_bytes)
        fail("a block is too short");
    if (held.block && ((uintptr_t)held.block % PAGE_BYTES || !tierstore_cache_owns(held.block + num_bytes - 1)))
        fail("a block lies where it may not");
    for (size_t at = 0; held.block && at + 8 <= num_bytes; at += PAGE_BYTES)
        *(uint64_t *)(held.block + at) = held.mark + at;
    return held;
}

static void look_at_and_free(Held held)
{
    for (size_t at = 0; held.block && at + 8 <= held.num_bytes; at += PAGE_BYTES)
        if (*(uint64_t *)(held.block + at) != held.mark + at)
            fail("the bytes of a block are another's");
    if (held.block)
        tierstore_cache_free(held.block);
}

static Held exchange(uint64_t *state, Held held)
{
    pthread_mutex_lock(&shared_lock);
    unsigned place = draw(state) % NUM_SHARED;
    Held before = shared[place];
    shared[place] = held;
    pthread_mutex_unlock(&shared_lock);
    return before;
}

static void change_mode(uint64_t *state)
{
    char text[64];
    CacheFigures figures;
    read_file("/proc/self", "statm", text, sizeof text);
    size_t resident = strtoull(strchr(text, ' '), NULL, 10) * PAGE_BYTES;
    uint64_t own_limit = draw(state) % 2 ? resident + draw(state) % (64 << 20) : 0;
    tierstore_cache_keep((Keeping)(draw(state) % 3), draw(state) % (64 << 20), own_limit);
    tierstore_cache_make_room(draw(state) % (32 << 20));
    if (draw(state) % 4 == 0)
        tierstore_cache_return_all();
    tierstore_cache_read(&figures);
    if (figures.lazy_bytes > figures.idle_bytes)
        fail("more is lazy than is idle");
}

/* Another thread may be in the cache meanwhile. */
static void fork_and_go_on(uint64_t *state)
{
    pid_t child = fork();
    if (!child) {
        CacheFigures figures;
        alarm(20); /* a lock that nobody holds any more ends it */
        tierstore_cache_read(&figures);
        if (figures.idle_bytes)
            fail("a child keeps idle chunks");
        for (int i = 0; i < 4; i++)
            look_at_and_free(make(state));
        _exit(0);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        fail("a child failed");
}

static void *work(void *seed)
{
    uint64_t state = (uint64_t)(uintptr_t)seed * 0x9E3779B97F4A7C15u + 1;
    for (unsigned step = 0; step < num_steps; step++) {
        look_at_and_free(exchange(&state, draw(&state) % 3 ? make(&state) : (Held){0}));
        if (draw(&state) % 16 == 0)
            change_mode(&state);
        if (draw(&state) % 12 == 0)
            fork_and_go_on(&state);
    }
    return NULL;
}

/* Every run begins where the one before it ends, and the figures say what the runs say. */
static void check_runs(void)
{
    uint32_t num_used = 0, num_idle = 0;
    for (uint32_t start = 0, was_free = 0; start < cache.num_pages; start += length_of(start)) {
        uint32_t kind = cache.pages[start].end & KIND;
        if (!length_of(start) || (kind != BLOCK && kind != FREE_START) || (was_free && kind == FREE_START))
            fail("runs do not join");
        was_free = kind == FREE_START;
        num_used += kind == BLOCK ? length_of(start) : 0;
    }
    for (uint32_t number = cache.oldest; number != NONE; number = cache.chunks[number].next, num_idle++)
        if (cache.chunks[number].used_pages || !(cache.chunks[number].flags & HAS_PAGES))
            fail("a chunk is idle that is not");
    if (num_idle != cache.num_idle || num_used * PAGE_BYTES != cache.figures.used_bytes)
        fail("the figures are wrong");
}

int main(int argc, char **argv)
{
    pthread_t threads[NUM_THREADS];
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    num_steps = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 1000;
    if (tierstore_cache_open())
        return 2;
    if (argc > 3)
        tierstore_cache_respect(argv[3], 2);
    for (int i = 0; i < NUM_THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(seed * NUM_THREADS + (uint64_t)i));
    for (int i = 0; i < NUM_THREADS; i++)
        pthread_join(threads[i], NULL);
    check_runs();
    for (int i = 0; i < NUM_SHARED; i++)
        look_at_and_free(shared[i]);
    check_runs();
    CacheFigures figures;
    tierstore_cache_read(&figures);
    printf("{\"used\": %lu, \"moved\": %lu}\n", figures.used_bytes, figures.moved_bytes);
    return 0;
}
