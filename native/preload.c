/* For LD_PRELOAD: large aligned blocks of the whole process come from the cache, those of PyTorch, oneDNN and MKL among
 * them; everything else from the allocator behind this one. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cache_blocks.h"

static const size_t PAGE = 4096;
static const size_t LEAST_BLOCK_BYTES = 256 << 10; /* LEAST_BYTES of chunk_cache.c: smaller ones do not begin it */

/* The function of that name behind this library's. It may be asked for by several threads at once: they find the same. */
#define NEXT(type, name) \
    static type next; \
    if (!next) \
        *(void **)&next = dlsym(RTLD_NEXT, name)

typedef int (*PosixMemalign)(void **, size_t, size_t);
typedef void *(*AlignedAlloc)(size_t, size_t);
typedef void (*Free)(void *);
typedef void *(*Realloc)(void *, size_t);
typedef size_t (*UsableSize)(void *);

/* `tierstore run` names the memory cgroups: a line for each, "VERSION FOLDER". */
static void begin(void)
{
    const char *groups = tierstore_cache_open() ? NULL : getenv("TIERSTORE_CGROUPS");
    while (groups && *groups) {
        const char *end = strchrnul(groups, '\n');
        char folder[1024];
        if (end - groups > 2 && (size_t)(end - groups - 2) < sizeof folder) {
            memcpy(folder, groups + 2, (size_t)(end - groups - 2));
            folder[end - groups - 2] = 0;
            tierstore_cache_respect(folder, *groups - '0');
        }
        groups = *end ? end + 1 : end;
    }
}

static void *large(size_t alignment, size_t num_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    bool is_valid = alignment >= sizeof(void *) && !(alignment & (alignment - 1)); /* else the next one says so */
    if (!is_valid || alignment > PAGE || num_bytes < LEAST_BLOCK_BYTES || pthread_once(&once, begin))
        return NULL;
    return tierstore_cache_allocate(num_bytes);
}

EXPORTED int posix_memalign(void **block, size_t alignment, size_t num_bytes)
{
    NEXT(PosixMemalign, "posix_memalign");
    void *found = large(alignment, num_bytes);
    if (!found)
        return next(block, alignment, num_bytes);
    *block = found;
    return 0;
}

EXPORTED void *aligned_alloc(size_t alignment, size_t num_bytes)
{
    NEXT(AlignedAlloc, "aligned_alloc");
    void *found = large(alignment, num_bytes);
    return found ? found : next(alignment, num_bytes);
}

EXPORTED void *memalign(size_t alignment, size_t num_bytes)
{
    NEXT(AlignedAlloc, "memalign");
    void *found = large(alignment, num_bytes);
    return found ? found : next(alignment, num_bytes);
}

EXPORTED void free(void *block)
{
    NEXT(Free, "free");
    if (!tierstore_cache_owns(block)) {
        next(block);
        return;
    }
    int error = errno; /* free() leaves it as it is */
    tierstore_cache_free(block);
    errno = error;
}

EXPORTED void *realloc(void *block, size_t num_bytes)
{
    NEXT(Realloc, "realloc");
    if (!tierstore_cache_owns(block))
        return next(block, num_bytes);
    void *found = num_bytes ? malloc(num_bytes) : NULL;
    if (found) {
        size_t size = tierstore_cache_size_of(block);
        memcpy(found, block, size < num_bytes ? size : num_bytes);
    }
    if (found || !num_bytes)
        tierstore_cache_free(block);
    return found;
}

EXPORTED size_t malloc_usable_size(void *block)
{
    NEXT(UsableSize, "malloc_usable_size");
    return tierstore_cache_owns(block) ? tierstore_cache_size_of(block) : next(block);
}
