/* What tierstore/returning/caching.py calls, in whichever library has the cache. */

#ifndef TIERSTORE_CACHE_API_H
#define TIERSTORE_CACHE_API_H

#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

typedef enum { KEEP_ALL, WITHIN_ROOM, WITHIN_BUDGET } Keeping;

typedef struct {
    uint64_t used_bytes, idle_bytes, lazy_bytes;       /* now: of blocks; of chunks without blocks; in these, freed lazily */
    uint64_t fresh_bytes, moved_bytes, returned_bytes; /* since the start */
    uint64_t num_looks;                                /* at the room, since the start */
} CacheFigures;

#ifdef __cplusplus
extern "C" {
#endif

/* Begins to serve, once; 0, or an errno. In a library for LD_PRELOAD: at the first large block. */
EXPORTED int tierstore_cache_open(void);

/* `budget_bytes`: of chunks without blocks, WITHIN_BUDGET. `own_limit_bytes`: of the process's resident memory; 0: none. */
EXPORTED void tierstore_cache_keep(Keeping keeping, uint64_t budget_bytes, uint64_t own_limit_bytes);

/* Begin to respect a memory cgroup, by its folder and version (1 or 2); after `folder` NULL: none is respected any more. */
EXPORTED void tierstore_cache_respect(const char *folder, int version);

/* So many bytes are about to be taken by others: gives back what they need. */
EXPORTED void tierstore_cache_make_room(uint64_t num_bytes);

EXPORTED void tierstore_cache_return_all(void);
EXPORTED void tierstore_cache_read(CacheFigures *figures);

#ifdef __cplusplus
}
#endif
#endif
