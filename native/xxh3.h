/* XXH3, 64 bits, seeded, for more than 240 bytes: written after the algorithm's specification
 * (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). tests/store/test_native.py compares it with the
 * xxhash library. */

#ifndef TIERSTORE_XXH3_H
#define TIERSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory: little-endian machines only"
#endif

enum { XXH3_LONGER_THAN = 240, XXH3_STRIPE = 64, XXH3_STRIPES_IN_BLOCK = 16, XXH3_SECRET_BYTES = 192 };

#define XXH3_PRIME32_1 0x9E3779B1ULL
#define XXH3_PRIME32_2 0x85EBCA77ULL
#define XXH3_PRIME32_3 0xC2B2AE3DULL
#define XXH3_PRIME64_1 0x9E3779B185EBCA87ULL
#define XXH3_PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define XXH3_PRIME64_3 0x165667B19E3779F9ULL
#define XXH3_PRIME64_4 0x85EBCA77C2B2AE63ULL
#define XXH3_PRIME64_5 0x27D4EB2F165667C5ULL
#define XXH3_PRIME_MX1 0x165667919E3779F9ULL

/* The specification's default secret, as 24 words. */
static const uint64_t XXH3_SECRET[XXH3_SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
    0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL,
    0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
    0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,
    0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

static inline uint64_t xxh3_word(const uint8_t *place)
{
    uint64_t word;
    memcpy(&word, place, sizeof word);
    return word;
}

/* Both take `num_stripes` stripes of 64 bytes into the accumulators, with the secret from its beginning on, eight bytes
 * further for each; where they fill a block, its end is mixed in. */

static void xxh3_stripes_plain(uint64_t *sums, const uint8_t *input, size_t num_stripes, const uint8_t *secret)
{
    for (size_t stripe = 0; stripe < num_stripes; stripe++, input += XXH3_STRIPE)
        for (int lane = 0; lane < 8; lane++) {
            uint64_t word = xxh3_word(input + 8 * lane);
            uint64_t keyed = word ^ xxh3_word(secret + 8 * stripe + 8 * lane);
            sums[lane ^ 1] += word;
            sums[lane] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
        }
}

static void xxh3_scramble(uint64_t *sums, const uint8_t *secret)
{
    for (int lane = 0; lane < 8; lane++) {
        uint64_t key = xxh3_word(secret + XXH3_SECRET_BYTES - XXH3_STRIPE + 8 * lane);
        sums[lane] = (sums[lane] ^ (sums[lane] >> 47) ^ key) * XXH3_PRIME32_1;
    }
}

static void xxh3_blocks_plain(uint64_t *sums, const uint8_t *input, size_t num_blocks, const uint8_t *secret)
{
    for (size_t block = 0; block < num_blocks; block++) {
        xxh3_stripes_plain(sums, input, XXH3_STRIPES_IN_BLOCK, secret);
        xxh3_scramble(sums, secret);
        input += XXH3_STRIPE * XXH3_STRIPES_IN_BLOCK;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void xxh3_blocks_avx2(uint64_t *sums, const uint8_t *input, size_t num_blocks,
                                                             const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi32((int)XXH3_PRIME32_1);
    __m256i sum[2] = {_mm256_loadu_si256((const __m256i *)sums), _mm256_loadu_si256((const __m256i *)(sums + 4))};
    for (size_t block = 0; block < num_blocks; block++) {
        for (int stripe = 0; stripe < XXH3_STRIPES_IN_BLOCK; stripe++, input += XXH3_STRIPE) {
            _mm_prefetch((const char *)input + 512, _MM_HINT_T0);
            for (int half = 0; half < 2; half++) {
                __m256i word = _mm256_loadu_si256((const __m256i *)(input + 32 * half));
                __m256i key = _mm256_loadu_si256((const __m256i *)(secret + 8 * stripe + 32 * half));
                __m256i keyed = _mm256_xor_si256(word, key);
                __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
                __m256i swapped = _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2));
                sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, swapped));
            }
        }
        for (int half = 0; half < 2; half++) {
            __m256i key = _mm256_loadu_si256((const __m256i *)(secret + XXH3_SECRET_BYTES - XXH3_STRIPE + 32 * half));
            __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47)), key);
            __m256i low = _mm256_mul_epu32(mixed, prime);
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            sum[half] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_storeu_si256((__m256i *)sums, sum[0]);
    _mm256_storeu_si256((__m256i *)(sums + 4), sum[1]);
}
#endif

static void xxh3_blocks(uint64_t *sums, const uint8_t *input, size_t num_blocks, const uint8_t *secret)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        xxh3_blocks_avx2(sums, input, num_blocks, secret);
        return;
    }
#endif
    xxh3_blocks_plain(sums, input, num_blocks, secret);
}

static inline uint64_t xxh3_fold(uint64_t one, uint64_t other)
{
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The hash of `num_bytes` > XXH3_LONGER_THAN bytes. */
static uint64_t xxh3(const uint8_t *input, size_t num_bytes, uint64_t seed)
{
    uint64_t words[XXH3_SECRET_BYTES / 8];
    for (int place = 0; place < XXH3_SECRET_BYTES / 8; place++)
        words[place] = place % 2 ? XXH3_SECRET[place] - seed : XXH3_SECRET[place] + seed;
    const uint8_t *secret = (const uint8_t *)words;
    uint64_t sums[8] = {XXH3_PRIME32_3, XXH3_PRIME64_1, XXH3_PRIME64_2, XXH3_PRIME64_3,
                        XXH3_PRIME64_4, XXH3_PRIME32_2, XXH3_PRIME64_5, XXH3_PRIME32_1};
    size_t block_bytes = XXH3_STRIPE * XXH3_STRIPES_IN_BLOCK;
    size_t num_blocks = (num_bytes - 1) / block_bytes;
    size_t rest_bytes = num_bytes - 1 - num_blocks * block_bytes;
    xxh3_blocks(sums, input, num_blocks, secret);
    xxh3_stripes_plain(sums, input + num_blocks * block_bytes, rest_bytes / XXH3_STRIPE, secret);
    xxh3_stripes_plain(sums, input + num_bytes - XXH3_STRIPE, 1, secret + XXH3_SECRET_BYTES - XXH3_STRIPE - 7);
    uint64_t hash = num_bytes * XXH3_PRIME64_1;
    for (int pair = 0; pair < 4; pair++)
        hash += xxh3_fold(sums[2 * pair] ^ xxh3_word(secret + 11 + 16 * pair),
                          sums[2 * pair + 1] ^ xxh3_word(secret + 19 + 16 * pair));
    hash = (hash ^ (hash >> 37)) * XXH3_PRIME_MX1;
    return hash ^ (hash >> 32);
}

#endif
