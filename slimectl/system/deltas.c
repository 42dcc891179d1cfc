/* Compares weights with earlier ones, and changes some of their numbers. deltas.py compiles and calls it. */

#include <emmintrin.h>
#include <stdint.h>

typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t UInt8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Short8 __attribute__((vector_size(16), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Rounds float32 to the nearest bfloat16, ties to even. A NaN becomes 0xffff, as in torch. */
INLINE Short8 rounded8(const float *from) {
    Float8 x = *(const Float8 *)from;
    UInt8 bits = (UInt8)x;
    bits += 0x7fff + ((bits >> 16) & 1);
    bits |= (UInt8)(x != x);
    return __builtin_convertvector(bits >> 16, Short8);
}

INLINE uint16_t rounded(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return x != x ? 0xffff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#define BLOCK 2048 /* so many numbers stay in the L1 cache between two passes */
#define AHEAD 512
#define FETCHED 4096 /* bytes */

INLINE uint64_t differing(Short8 left, Short8 right, const uint16_t *old) {
    left = left != *(const Short8 *)old, right = right != *(const Short8 *)(old + 8);
    return (unsigned)_mm_movemask_epi8(_mm_packs_epi16((__m128i)left, (__m128i)right));
}

/* Rounds numbers. Returns how many differ from the old ones, with their places and the xor of the bits. */
long round_and_compare(const float *from, const uint16_t *old, uint16_t *to, long count, int64_t first,
                       int64_t *places, uint16_t *xors) {
    long found = 0;
    for (long start = 0; start < count; start += BLOCK) {
        uint64_t masks[BLOCK / 64] = {0}; /* one bit per differing number, because branches would stall reads */
        long end = count - start < BLOCK ? count : start + BLOCK, i = start;
        for (; i + 16 <= end; i += 16) {
            __builtin_prefetch(from + i + AHEAD);
            __builtin_prefetch(old + i + AHEAD);
            Short8 left = rounded8(from + i), right = rounded8(from + i + 8);
            *(Short8 *)(to + i) = left;
            *(Short8 *)(to + i + 8) = right;
            masks[(i - start) / 64] |= differing(left, right, old + i) << (i - start) % 64;
        }
        for (; i < end; i++) {
            to[i] = rounded(from[i]);
            masks[(i - start) / 64] |= (uint64_t)(to[i] != old[i]) << (i - start) % 64;
        }
        for (long word = 0; word < BLOCK / 64; word++)
            for (uint64_t mask = masks[word]; mask; mask &= mask - 1, found++) {
                long at = start + word * 64 + __builtin_ctzll(mask);
                places[found] = first + at;
                xors[found] = old[at] ^ to[at];
            }
    }
    return found;
}

/* Changes numbers by xor with `bits`, and returns their indices. `gaps` counts the unchanged numbers before each.
   Prefetches all cache lines ahead, because a checksum of all numbers follows. */
#define CHANGE(NUMBER, GAP)                                                                   \
    for (long c = 0, at = -1; c < count; c++) {                                               \
        at += (long)((const GAP *)gaps)[c] + 1;                                               \
        NUMBER *number = (NUMBER *)numbers + at;                                              \
        for (; fetched < (char *)number + FETCHED; fetched += 64) __builtin_prefetch(fetched); \
        *number ^= ((const NUMBER *)bits)[c];                                                 \
        indices[c] = at;                                                                      \
    }

void change_numbers(void *numbers, long width, const void *gaps, long gap_width, const void *bits, long count,
                    int64_t *indices) {
    const char *fetched = numbers;
    switch (width * 8 + gap_width) {
    case 17: CHANGE(uint16_t, uint8_t) break;
    case 18: CHANGE(uint16_t, uint16_t) break;
    case 20: CHANGE(uint16_t, uint32_t) break;
    case 33: CHANGE(uint32_t, uint8_t) break;
    case 34: CHANGE(uint32_t, uint16_t) break;
    case 36: CHANGE(uint32_t, uint32_t) break;
    }
}
