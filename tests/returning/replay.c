/* Replays recorded allocations on the cache of `native/`, and prints a line of JSON for each step.
 *
 * The trace is on standard input: "a BYTES" makes the next block, "f NUMBER" frees that one, "s" begins a step, or ends the
 * last. Each page of a block is written when it is made, with the block's number, and looked at when it is freed. The
 * arguments: MiB of shared memory that is taken first, as a daemon's window, then folders of memory cgroups (version 1). */

#include "chunk_cache.c"

enum { MOST_BLOCKS = 1 << 20 };
static uint8_t *blocks[MOST_BLOCKS];
static size_t sizes[MOST_BLOCKS];

static void stamp(size_t number)
{
    for (size_t at = 0; at < sizes[number]; at += PAGE_BYTES)
        *(volatile uint64_t *)(blocks[number] + at) = number * 1000003 + at;
}

static bool is_whole(size_t number)
{
    for (size_t at = 0; at < sizes[number]; at += PAGE_BYTES)
        if (*(uint64_t *)(blocks[number] + at) != number * 1000003 + at)
            return false;
    return true;
}

static size_t resident_bytes(void)
{
    size_t num = 0;
    for (uint32_t number = 0; number < cache.ready_pages / CHUNK_PAGES; number++)
        num += cache.chunks[number].flags & HAS_PAGES;
    return num * CHUNK_BYTES;
}

int main(int argc, char **argv)
{
    char line[64];
    size_t num_blocks = 0, living = 0, most_living = 0, most_resident = 0, num;
    struct rusage before, after;
    CacheFigures last = {0};
    bool has_begun = false;
    if (tierstore_cache_open())
        return 2;
    for (int i = 2; i < argc; i++)
        tierstore_cache_respect(argv[i], 1);
    size_t shared = argc > 1 ? strtoul(argv[1], NULL, 10) << 20 : 0;
    if (shared) {
        tierstore_cache_make_room(shared);
        memset(mmap(NULL, shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), 1, shared);
    }
    while (fgets(line, sizeof line, stdin)) {
        num = line[1] == ' ' ? strtoul(line + 2, NULL, 10) : 0;
        if (line[0] == 'a') {
            sizes[num_blocks] = num;
            blocks[num_blocks] = tierstore_cache_allocate(num);
            if (!blocks[num_blocks])
                return 3;
            stamp(num_blocks++);
            living += num;
            most_living = living > most_living ? living : most_living;
            size_t resident = resident_bytes();
            most_resident = resident > most_resident ? resident : most_resident;
        } else if (line[0] == 'f') {
            if (!is_whole(num))
                return 4;
            tierstore_cache_free(blocks[num]);
            living -= sizes[num];
        } else {
            CacheFigures now;
            tierstore_cache_read(&now);
            getrusage(RUSAGE_SELF, &after);
            if (has_begun)
                printf("{\"faults\": %ld, \"living\": %zu, \"resident\": %zu, \"fresh\": %lu, \"moved\": %lu, \"returned\": %lu, "
                       "\"looks\": %lu}\n",
                       after.ru_minflt - before.ru_minflt, most_living, most_resident, now.fresh_bytes - last.fresh_bytes,
                       now.moved_bytes - last.moved_bytes, now.returned_bytes - last.returned_bytes,
                       now.num_looks - last.num_looks);
            has_begun = true;
            getrusage(RUSAGE_SELF, &before);
            last = now;
            most_living = living;
            most_resident = 0;
        }
    }
    return 0;
}
