/* Blocks of bfloat16 or float32 with packed exponents: the format of tierstore/disk/codec/floats.py, which says what
 * each part is and does the same in numpy. A row of the block passes through the first-level cache; the loops are
 * plain, so that the compiler makes vector instructions of them. */

#ifndef TIERSTORE_FLOATS_H
#define TIERSTORE_FLOATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    FLOATS_HEADER_BYTES = 8,
    FLOATS_ROW = 4096,        /* elements whose codes lie together */
    FLOATS_GROUP = 64,        /* the last row is filled up to a multiple of it */
    FLOATS_USUAL_ESCAPES = 4, /* of a group: so many are moved without a branch */
    FLOATS_SAMPLE_STRIDE = 127,
    FLOATS_MOST_WIDTH = 7,
    FLOATS_WORST_CODE_BITS = 6,
};

#define FLOATS_INLINE static inline __attribute__((always_inline))

/* Elements lie at any address. */
typedef uint16_t __attribute__((aligned(1), may_alias)) floats_u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) floats_u32;

typedef struct {
    int width;
    uint8_t base;
    bool is_sparse;
} FloatsChoice;

FLOATS_INLINE uint32_t floats_element(const uint8_t *elements, size_t index, int itemsize)
{
    if (itemsize == 2)
        return (uint32_t)((const floats_u16 *)elements)[index] << 16;
    return ((const floats_u32 *)elements)[index];
}

/* The least bits for the codes of all sampled elements; their widths and base go to `choice`. */
static uint32_t floats_choose_width(const uint32_t *counts, FloatsChoice *choice)
{
    uint32_t below[257] = {0}, least_bits = UINT32_MAX;
    for (int exponent = 0; exponent < 256; exponent++)
        below[exponent + 1] = below[exponent] + counts[exponent];
    for (int width = 1; width <= FLOATS_MOST_WIDTH; width++) {
        int num_codes = (1 << width) - 1;
        for (int first = 0; first + num_codes <= 256; first++) {
            uint32_t num_escapes = below[256] - (below[first + num_codes] - below[first]);
            uint32_t bits = below[256] * (uint32_t)width + 8 * num_escapes;
            if (bits < least_bits) {
                least_bits = bits;
                choice->width = width;
                choice->base = (uint8_t)(first - 1);
            }
        }
    }
    return least_bits;
}

/* Looks at a sample. False: packing would gain too little. */
static bool floats_choose(const uint8_t *elements, size_t count, int itemsize, FloatsChoice *choice)
{
    uint32_t counts[256] = {0}, num_sampled = 0, num_zeros = 0;
    for (size_t index = 0; index < count; index += FLOATS_SAMPLE_STRIDE, num_sampled++) {
        uint32_t element = floats_element(elements, index, itemsize);
        num_zeros += element == 0;
        counts[(element >> 23) & 255]++;
    }
    choice->is_sparse = 8 * num_zeros >= num_sampled;
    if (choice->is_sparse)
        counts[0] -= num_zeros;
    uint32_t code_bits = floats_choose_width(counts, choice);
    return code_bits <= FLOATS_WORST_CODE_BITS * num_sampled;
}

/* --- zeros ------------------------------------------------------------------------------------------------------ */

/* Write a bit for each of `count` elements, a multiple of 8, and copy those that are not 0; returns their number. */
FLOATS_INLINE size_t floats_leave_out(const uint8_t *elements, size_t count, int itemsize, uint8_t *mask, uint8_t *kept)
{
    const uint8_t *begin = kept;
    for (size_t first = 0; first < count; first += 8) {
        unsigned bits = 0;
        for (unsigned lane = 0; lane < 8; lane++, elements += itemsize) {
            unsigned is_kept = floats_element(elements, 0, itemsize) != 0;
            memcpy(kept, elements, (size_t)itemsize); /* the next one takes its place if it is 0 */
            kept += is_kept * (unsigned)itemsize;
            bits |= is_kept << lane;
        }
        mask[first / 8] = (uint8_t)bits;
    }
    return (size_t)(kept - begin) / (size_t)itemsize;
}

FLOATS_INLINE void floats_put_back(const uint8_t *kept, size_t count, int itemsize, const uint8_t *mask,
                                   uint8_t *elements)
{
    for (size_t at = 0; at < count; at++) {
        uint32_t is_kept = (mask[at / 8] >> at % 8) & 1;
        if (itemsize == 2)
            ((floats_u16 *)elements)[at] = (uint16_t)(*(const floats_u16 *)kept & (0 - is_kept));
        else
            ((floats_u32 *)elements)[at] = *(const floats_u32 *)kept & (0 - is_kept);
        kept += is_kept * (uint32_t)itemsize;
    }
}

static size_t floats_leave_out_plain(const uint8_t *elements, size_t count, int itemsize, uint8_t *mask, uint8_t *kept)
{
    return itemsize == 2 ? floats_leave_out(elements, count, 2, mask, kept)
                         : floats_leave_out(elements, count, 4, mask, kept);
}

static void floats_put_back_plain(const uint8_t *kept, size_t count, int itemsize, const uint8_t *mask,
                                  uint8_t *elements)
{
    if (itemsize == 2)
        floats_put_back(kept, count, 2, mask, elements);
    else
        floats_put_back(kept, count, 4, mask, elements);
}

#if defined(__x86_64__)
#define FLOATS_AVX2 __attribute__((target("avx2,popcnt")))

/* For each mask of eight elements, a byte for each lane. `kept`: the lanes whose bit is set, in order. `place`: how
 * many are set before this one; 0x80 where it is not set itself. */
static struct {
    uint64_t kept[256], place[256];
} floats_lanes;

static void floats_fill_lanes(void)
{
    for (unsigned mask = 0; mask < 256; mask++) {
        uint64_t kept = 0, place = 0;
        unsigned num = 0;
        for (unsigned lane = 0; lane < 8; lane++) {
            bool is_kept = (mask >> lane) & 1;
            kept |= is_kept ? (uint64_t)lane << 8 * num : 0;
            place |= (is_kept ? (uint64_t)num : 0x80) << 8 * lane;
            num += is_kept;
        }
        floats_lanes.kept[mask] = kept;
        floats_lanes.place[mask] = place;
    }
}

/* Eight bytes that number elements of two bytes, as sixteen that number bytes; the highest bit stays. */
FLOATS_AVX2 static inline __m128i floats_byte_lanes(uint64_t lanes)
{
    __m128i lane = _mm_cvtsi64_si128((long long)lanes);
    __m128i twice = _mm_or_si128(_mm_add_epi8(lane, lane), _mm_and_si128(lane, _mm_set1_epi8((char)0x80)));
    return _mm_unpacklo_epi8(twice, _mm_or_si128(twice, _mm_set1_epi8(1)));
}

/* Eight elements are stored at once. None goes beyond `count`, because no more are kept than were read. */
FLOATS_AVX2 static size_t floats_leave_out_avx2(const uint8_t *elements, size_t count, int itemsize, uint8_t *mask,
                                                uint8_t *kept)
{
    const uint8_t *begin = kept;
    for (size_t first = 0; first < count; first += 8) {
        unsigned zeros;
        if (itemsize == 4) {
            __m256i eight = _mm256_loadu_si256((const __m256i *)(elements + 4 * first));
            __m256i is_zero = _mm256_cmpeq_epi32(eight, _mm256_setzero_si256());
            zeros = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(is_zero));
            __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)floats_lanes.kept[~zeros & 255]));
            _mm256_storeu_si256((__m256i *)kept, _mm256_permutevar8x32_epi32(eight, lanes));
        } else {
            __m128i eight = _mm_loadu_si128((const __m128i *)(elements + 2 * first));
            __m128i is_zero = _mm_cmpeq_epi16(eight, _mm_setzero_si128());
            zeros = (unsigned)_mm_movemask_epi8(_mm_packs_epi16(is_zero, _mm_setzero_si128()));
            __m128i lanes = floats_byte_lanes(floats_lanes.kept[~zeros & 255]);
            _mm_storeu_si128((__m128i *)kept, _mm_shuffle_epi8(eight, lanes));
        }
        mask[first / 8] = (uint8_t)~zeros;
        kept += __builtin_popcount(~zeros & 255) * itemsize;
    }
    return (size_t)(kept - begin) / (size_t)itemsize;
}

FLOATS_AVX2 static void floats_put_back_avx2(const uint8_t *kept, size_t count, int itemsize, const uint8_t *mask,
                                             uint8_t *elements)
{
    for (size_t first = 0; first < count; first += 8) {
        unsigned bits = mask[first / 8];
        if (itemsize == 4) {
            __m256i lanes = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)floats_lanes.place[bits]));
            __m256i eight = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)kept), lanes);
            eight = _mm256_andnot_si256(_mm256_srai_epi32(lanes, 31), eight);
            _mm256_storeu_si256((__m256i *)(elements + 4 * first), eight);
        } else {
            __m128i lanes = floats_byte_lanes(floats_lanes.place[bits]);
            __m128i eight = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)kept), lanes);
            _mm_storeu_si128((__m128i *)(elements + 2 * first), eight);
        }
        kept += __builtin_popcount(bits) * itemsize;
    }
}
#endif

/* --- codes ------------------------------------------------------------------------------------------------------ */

/* Bits `from` and up of each of `count` codes. Each byte takes them from as many codes as fit, evenly apart. */
FLOATS_INLINE void floats_put_bits(const uint8_t *restrict codes, size_t count, int from, int bits,
                                   uint8_t *restrict out)
{
    size_t apart = count * (size_t)bits / 8;
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
#define FLOATS_OF(part) (((codes[at + part * apart] >> from) & mask) << (part * bits))
    if (bits == 4)
        for (size_t at = 0; at < apart; at++)
            out[at] = (uint8_t)(FLOATS_OF(0) | FLOATS_OF(1));
    else if (bits == 2)
        for (size_t at = 0; at < apart; at++)
            out[at] = (uint8_t)(FLOATS_OF(0) | FLOATS_OF(1) | FLOATS_OF(2) | FLOATS_OF(3));
    else
        for (size_t at = 0; at < apart; at++)
            out[at] = (uint8_t)(FLOATS_OF(0) | FLOATS_OF(1) | FLOATS_OF(2) | FLOATS_OF(3) | FLOATS_OF(4) |
                                FLOATS_OF(5) | FLOATS_OF(6) | FLOATS_OF(7));
#undef FLOATS_OF
}

FLOATS_INLINE void floats_get_bits(const uint8_t *restrict in, size_t count, int from, int bits,
                                   uint8_t *restrict codes)
{
    size_t apart = count * (size_t)bits / 8;
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
#pragma GCC unroll 8
    for (int part = 0; part < 8 / bits; part++)
        for (size_t at = 0; at < apart; at++) {
            uint8_t found = (uint8_t)(((in[at] >> part * bits) & mask) << from);
            codes[(size_t)part * apart + at] = from ? codes[(size_t)part * apart + at] | found : found;
        }
}

/* `width` is a constant for the compiler where these two are used: see `FLOATS_FOR_WIDTH`. */
FLOATS_INLINE void floats_put_codes(const uint8_t *codes, size_t count, int width, uint8_t *out)
{
    if (width & 4)
        floats_put_bits(codes, count, 0, 4, out);
    out += (width & 4) * count / 8;
    if (width & 2)
        floats_put_bits(codes, count, width & 4, 2, out);
    out += (width & 2) * count / 8;
    if (width & 1)
        floats_put_bits(codes, count, width & 6, 1, out);
}

FLOATS_INLINE void floats_get_codes(const uint8_t *in, size_t count, int width, uint8_t *codes)
{
    if (width & 4)
        floats_get_bits(in, count, 0, 4, codes);
    in += (width & 4) * count / 8;
    if (width & 2)
        floats_get_bits(in, count, width & 4, 2, codes);
    in += (width & 2) * count / 8;
    if (width & 1)
        floats_get_bits(in, count, width & 6, 1, codes);
}

#define FLOATS_FOR_WIDTH(width, call)                                                                                  \
    switch (width) {                                                                                                   \
    case 1: { enum { W = 1 }; call; break; }                                                                           \
    case 2: { enum { W = 2 }; call; break; }                                                                           \
    case 3: { enum { W = 3 }; call; break; }                                                                           \
    case 4: { enum { W = 4 }; call; break; }                                                                           \
    case 5: { enum { W = 5 }; call; break; }                                                                           \
    case 6: { enum { W = 6 }; call; break; }                                                                           \
    default: { enum { W = 7 }; call; break; }                                                                          \
    }

/* A bit for each of 64 codes: whether it is 0. */
FLOATS_INLINE uint64_t floats_escapes(const uint8_t *codes)
{
    uint64_t found = 0;
#if defined(__x86_64__)
    for (int part = 0; part < 4; part++) {
        __m128i is_zero = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(codes + 16 * part)), _mm_setzero_si128());
        found |= (uint64_t)(uint16_t)_mm_movemask_epi8(is_zero) << 16 * part;
    }
#else
    for (int lane = 0; lane < FLOATS_GROUP; lane++)
        found |= (uint64_t)(codes[lane] == 0) << lane;
#endif
    return found;
}

/* --- a block ---------------------------------------------------------------------------------------------------- */

/* The places of a packed block's parts, behind its mask. */
typedef struct {
    size_t signs, halves, codes, escapes;
} FloatsLayout;

static FloatsLayout floats_lay_out(size_t begin, size_t num_kept, int itemsize, int width)
{
    size_t filled = (num_kept + FLOATS_GROUP - 1) / FLOATS_GROUP * FLOATS_GROUP;
    FloatsLayout layout = {.signs = begin, .halves = begin + num_kept};
    layout.codes = layout.halves + num_kept * (size_t)(itemsize - 2);
    layout.escapes = layout.codes + filled / 8 * (size_t)width;
    return layout;
}

/* Split `count` elements: exponents, codes (filled up to whole groups), signs, and lower halves. */
FLOATS_INLINE void floats_split(const uint8_t *elements, size_t count, int itemsize, FloatsChoice choice,
                                uint8_t *restrict exponents, uint8_t *restrict codes, uint8_t *restrict signs,
                                uint8_t *restrict halves)
{
    const uint8_t most = (uint8_t)((1 << choice.width) - 1), base = choice.base;
    for (size_t at = 0; at < count; at++) {
        uint16_t upper = itemsize == 2 ? ((const floats_u16 *)elements)[at]
                                       : (uint16_t)(((const floats_u32 *)elements)[at] >> 16);
        uint8_t exponent = (uint8_t)(upper >> 7), code = (uint8_t)(exponent - base);
        exponents[at] = exponent;
        signs[at] = (uint8_t)((upper & 0x7f) | ((upper >> 8) & 0x80));
        codes[at] = code <= most ? code : 0;
    }
    if (itemsize == 4)
        for (size_t at = 0; at < count; at++)
            ((floats_u16 *)halves)[at] = (uint16_t)((const floats_u32 *)elements)[at];
    for (size_t at = count; at % FLOATS_GROUP; at++)
        codes[at] = 1;
}

FLOATS_INLINE void floats_join(const uint8_t *codes, size_t count, int itemsize, uint8_t base,
                               const uint8_t *restrict signs, const uint8_t *restrict halves,
                               uint8_t *restrict elements)
{
    for (size_t at = 0; at < count; at++) {
        uint8_t exponent = (uint8_t)(codes[at] + base);
        uint16_t upper = (uint16_t)((exponent << 7) | (signs[at] & 0x7f) | ((signs[at] & 0x80) << 8));
        if (itemsize == 2)
            ((floats_u16 *)elements)[at] = upper;
        else
            ((floats_u32 *)elements)[at] = (uint32_t)upper << 16 | ((const floats_u16 *)halves)[at];
    }
}

/* Write the exponents whose codes are 0; returns their number. Writes up to FLOATS_USUAL_ESCAPES bytes behind them. */
FLOATS_INLINE size_t floats_put_escapes(const uint8_t *codes, const uint8_t *exponents, size_t count, uint8_t *escapes)
{
    const uint8_t *begin = escapes;
    for (size_t first = 0; first < count; first += FLOATS_GROUP) {
        uint64_t found = floats_escapes(codes + first);
        int num = __builtin_popcountll(found);
        for (int each = 0; each < FLOATS_USUAL_ESCAPES; each++, found &= found - 1)
            escapes[each] = exponents[first + (size_t)__builtin_ctzll(found | 1ULL << 63)];
        for (int each = FLOATS_USUAL_ESCAPES; each < num; each++, found &= found - 1)
            escapes[each] = exponents[first + (size_t)__builtin_ctzll(found)];
        escapes += num;
    }
    return (size_t)(escapes - begin);
}

/* Give codes that are 0 the value that stands for their exponent; returns the end, or NULL if there are too few.
 * `codes` has room behind its row for what is written where none is left in a group. */
FLOATS_INLINE const uint8_t *floats_take_escapes(uint8_t *codes, size_t count, uint8_t base, const uint8_t *escapes,
                                                 const uint8_t *end)
{
    for (size_t first = 0; first < count; first += FLOATS_GROUP) {
        uint64_t found = floats_escapes(codes + first);
        int num = __builtin_popcountll(found);
        if (end - escapes < num + FLOATS_USUAL_ESCAPES)
            return NULL;
        for (int each = 0; each < FLOATS_USUAL_ESCAPES; each++, found &= found - 1) {
            uint64_t is_none = !found;
            size_t lane = (size_t)__builtin_ctzll(found | is_none << 63) + is_none * FLOATS_ROW;
            codes[first + lane] = (uint8_t)(escapes[each] - base);
        }
        for (int each = FLOATS_USUAL_ESCAPES; each < num; each++, found &= found - 1)
            codes[first + (size_t)__builtin_ctzll(found)] = (uint8_t)(escapes[each] - base);
        escapes += num;
    }
    return escapes;
}

/* Pack `count` elements into `out`, behind `begin` bytes; returns the bytes used, or 0: `room` or more. */
FLOATS_INLINE size_t floats_pack_rows(const uint8_t *elements, size_t count, int itemsize, FloatsChoice choice,
                                      uint8_t *out, size_t begin, size_t room)
{
    uint8_t codes[FLOATS_ROW], exponents[FLOATS_ROW], escapes[FLOATS_ROW + FLOATS_USUAL_ESCAPES];
    FloatsLayout layout = floats_lay_out(begin, count, itemsize, choice.width);
    size_t used = layout.escapes;
    if (used + FLOATS_USUAL_ESCAPES >= room)
        return 0;
    uint8_t *packed = out + layout.codes;
    for (size_t first = 0; first < count; first += FLOATS_ROW) {
        size_t in_row = count - first < FLOATS_ROW ? count - first : FLOATS_ROW;
        size_t filled = (in_row + FLOATS_GROUP - 1) / FLOATS_GROUP * FLOATS_GROUP;
        floats_split(elements + first * (size_t)itemsize, in_row, itemsize, choice, exponents, codes,
                     out + layout.signs + first, out + layout.halves + first * (size_t)(itemsize - 2));
        FLOATS_FOR_WIDTH(choice.width, floats_put_codes(codes, filled, W, packed))
        packed += filled / 8 * (size_t)choice.width;
        size_t num_escapes = floats_put_escapes(codes, exponents, in_row, escapes);
        if (used + num_escapes + FLOATS_USUAL_ESCAPES >= room)
            return 0;
        memcpy(out + used, escapes, num_escapes);
        used += num_escapes;
    }
    memset(out + used, 0, FLOATS_USUAL_ESCAPES);
    return used + FLOATS_USUAL_ESCAPES;
}

/* Undo it; false: these are no such rows. */
FLOATS_INLINE bool floats_unpack_rows(const uint8_t *in, size_t begin, size_t num_bytes, size_t count, int itemsize,
                                      FloatsChoice choice, uint8_t *elements)
{
    uint8_t codes[2 * FLOATS_ROW];
    FloatsLayout layout = floats_lay_out(begin, count, itemsize, choice.width);
    if (layout.escapes > num_bytes)
        return false;
    const uint8_t *packed = in + layout.codes, *escapes = in + layout.escapes, *end = in + num_bytes;
    for (size_t first = 0; first < count; first += FLOATS_ROW) {
        size_t in_row = count - first < FLOATS_ROW ? count - first : FLOATS_ROW;
        size_t filled = (in_row + FLOATS_GROUP - 1) / FLOATS_GROUP * FLOATS_GROUP;
        FLOATS_FOR_WIDTH(choice.width, floats_get_codes(packed, filled, W, codes))
        packed += filled / 8 * (size_t)choice.width;
        escapes = floats_take_escapes(codes, filled, choice.base, escapes, end);
        if (escapes == NULL)
            return false;
        floats_join(codes, in_row, itemsize, choice.base, in + layout.signs + first,
                    in + layout.halves + first * (size_t)(itemsize - 2), elements + first * (size_t)itemsize);
    }
    return end - escapes == FLOATS_USUAL_ESCAPES;
}

/* The same code twice, for the instructions that every machine has and for AVX2. */
typedef struct {
    size_t (*leave_out)(const uint8_t *, size_t, int, uint8_t *, uint8_t *);
    void (*put_back)(const uint8_t *, size_t, int, const uint8_t *, uint8_t *);
    size_t (*pack)(const uint8_t *, size_t, int, FloatsChoice, uint8_t *, size_t, size_t);
    bool (*unpack)(const uint8_t *, size_t, size_t, size_t, int, FloatsChoice, uint8_t *);
} FloatsKernels;

#define FLOATS_VARIANT(attribute, name)                                                                                \
    attribute static size_t floats_pack_##name(const uint8_t *elements, size_t count, int itemsize,                    \
                                               FloatsChoice choice, uint8_t *out, size_t begin, size_t room)           \
    {                                                                                                                  \
        return itemsize == 2 ? floats_pack_rows(elements, count, 2, choice, out, begin, room)                          \
                             : floats_pack_rows(elements, count, 4, choice, out, begin, room);                         \
    }                                                                                                                  \
    attribute static bool floats_unpack_##name(const uint8_t *in, size_t begin, size_t num_bytes, size_t count,        \
                                               int itemsize, FloatsChoice choice, uint8_t *elements)                   \
    {                                                                                                                  \
        return itemsize == 2 ? floats_unpack_rows(in, begin, num_bytes, count, 2, choice, elements)                    \
                             : floats_unpack_rows(in, begin, num_bytes, count, 4, choice, elements);                   \
    }                                                                                                                  \
    static const FloatsKernels floats_kernels_##name = {floats_leave_out_##name, floats_put_back_##name,               \
                                                        floats_pack_##name, floats_unpack_##name};

FLOATS_VARIANT(, plain)
#if defined(__x86_64__)
FLOATS_VARIANT(FLOATS_AVX2, avx2)
#endif

static const FloatsKernels *floats_kernels(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return &floats_kernels_avx2;
#endif
    return &floats_kernels_plain;
}

/* Pack a block of `num_bytes` into `out`, of as many bytes; returns the bytes used, or 0: it stays as it is.
 * `workspace`: as many bytes again. */
static size_t floats_pack(const uint8_t *block, size_t num_bytes, int itemsize, uint8_t *out, uint8_t *workspace)
{
    FloatsChoice choice = {.width = 1};
    size_t count = num_bytes / (size_t)itemsize, num_kept = count, begin = FLOATS_HEADER_BYTES;
    if (num_bytes <= FLOATS_HEADER_BYTES || num_bytes % (8 * (size_t)itemsize))
        return 0;
    if (!floats_choose(block, count, itemsize, &choice))
        return 0;
    const FloatsKernels *kernels = floats_kernels();
    const uint8_t *elements = block;
    if (choice.is_sparse) {
        begin += count / 8;
        num_kept = kernels->leave_out(block, count, itemsize, out + FLOATS_HEADER_BYTES, workspace);
        elements = workspace;
    }
    uint32_t kept = (uint32_t)num_kept;
    const uint8_t header[4] = {(uint8_t)choice.width, choice.base, choice.is_sparse, 0};
    memcpy(out, header, sizeof header);
    memcpy(out + sizeof header, &kept, sizeof kept);
    return kernels->pack(elements, num_kept, itemsize, choice, out, begin, num_bytes);
}

/* Undo `floats_pack`; false: these are not its bytes. */
static bool floats_unpack(const uint8_t *in, size_t num_bytes, int itemsize, uint8_t *block, size_t block_bytes,
                          uint8_t *workspace)
{
    size_t count = block_bytes / (size_t)itemsize, begin = FLOATS_HEADER_BYTES;
    uint32_t num_kept;
    if (num_bytes < begin || block_bytes % (8 * (size_t)itemsize))
        return false;
    FloatsChoice choice = {.width = in[0], .base = in[1], .is_sparse = in[2] == 1};
    memcpy(&num_kept, in + 4, sizeof num_kept);
    if (choice.width < 1 || choice.width > FLOATS_MOST_WIDTH || in[2] > 1 || in[3] != 0)
        return false;
    const FloatsKernels *kernels = floats_kernels();
    if (!choice.is_sparse)
        return num_kept == count && kernels->unpack(in, begin, num_bytes, count, itemsize, choice, block);
    const uint8_t *mask = in + begin;
    begin += count / 8;
    size_t num_set = 0;
    if (begin > num_bytes)
        return false;
    for (size_t at = 0; at < count / 8; at++)
        num_set += (size_t)__builtin_popcount(mask[at]);
    if (num_set != num_kept || !kernels->unpack(in, begin, num_bytes, num_kept, itemsize, choice, workspace))
        return false;
    kernels->put_back(workspace, count, itemsize, mask, block);
    return true;
}

#endif
