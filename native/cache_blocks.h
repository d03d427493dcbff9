/* Blocks of the cache, for what serves them to others: torch_allocator.cpp and preload.c. */

#ifndef TIERSTORE_CACHE_BLOCKS_H
#define TIERSTORE_CACHE_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>

#include "cache_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A block at the start of a page; NULL: it is to come from elsewhere. Its bytes are anything. */
void *tierstore_cache_allocate(size_t num_bytes);
void tierstore_cache_free(void *block);
bool tierstore_cache_owns(const void *block);
size_t tierstore_cache_size_of(const void *block);

#ifdef __cplusplus
}
#endif
#endif
