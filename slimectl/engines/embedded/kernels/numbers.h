/* Vector arithmetic. Numbers are float32 in registers. In memory they have type ELEMENT: float32, or bfloat16 if BFLOAT16 is
   defined. */

#pragma once
#include <immintrin.h>
#include <stdint.h>

/* LANES numbers fill a register. Attention computes HEADS query heads at a time, and products TILE rows. */
#ifdef __AVX512F__
#define LANES 16
#define HEADS 4
#define TILE 12
#else
#define LANES 8
#define HEADS 2
#define TILE 6
#endif

typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Float4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Int8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t UInt8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Short8 __attribute__((vector_size(16), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Returns float32 bits whose upper half is the nearest bfloat16, ties to even. A NaN becomes 0xffff, as in torch. */
typedef uint32_t UInts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
INLINE UInts rounded_bits(Floats x) {
    UInts bits = (UInts)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) | (UInts)(x != x);
}
INLINE Short8 rounded8(Float8 x) {
    UInt8 bits = (UInt8)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) | (UInt8)(x != x);
    return __builtin_convertvector(bits >> 16, Short8);
}

INLINE Float8 all8(float x) { return (Float8){x, x, x, x, x, x, x, x}; }

#ifdef BFLOAT16
typedef uint16_t ELEMENT;
INLINE Float8 load(const ELEMENT *from) {
    return (Float8)(__builtin_convertvector(*(const Short8 *)from, UInt8) << 16);
}
INLINE void store(ELEMENT *to, Float8 x) { *(Short8 *)to = rounded8(x); }
INLINE Floats load_lanes(const ELEMENT *from) {
#if LANES == 16 /* GCC 12 widens by halves */
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return load(from);
#endif
}
#else
typedef float ELEMENT;
INLINE Float8 load(const ELEMENT *from) { return *(const Float8 *)from; }
INLINE Floats load_lanes(const ELEMENT *from) { return *(const Floats *)from; }
INLINE void store(ELEMENT *to, Float8 x) { *(Float8 *)to = x; }
#endif

/* Returns a single number. */
INLINE float number(const ELEMENT *from) {
#ifdef BFLOAT16
    uint32_t bits = (uint32_t)*from << 16;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
#else
    return *from;
#endif
}

#if LANES == 16
INLINE Float8 low8(Floats x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE Float8 high8(Floats x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Float8 halves_sum(Floats x) { return low8(x) + high8(x); }
INLINE void store_lanes(ELEMENT *to, Floats x) {
    store(to, low8(x));
    store(to + 8, high8(x));
}
#else
INLINE Float8 halves_sum(Floats x) { return x; }
INLINE void store_lanes(ELEMENT *to, Floats x) { store(to, x); }
#endif
INLINE Float4 low4(Float8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINE Float4 high4(Float8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }

INLINE Float8 either(Int8 mask, Float8 x, Float8 y) { return (Float8)(((Int8)x & mask) | ((Int8)y & ~mask)); }

INLINE float sum8(Float8 x) {
    Float4 half = low4(x) + high4(x);
    half += __builtin_shufflevector(half, half, 2, 3, 0, 1);
    return half[0] + half[1];
}

/* e^x to two units in the last place. x is clamped to [-87, 88]. */
INLINE Float8 exp8(Float8 x) {
    x = either(x < all8(-87), all8(-87), x);
    x = either(x > all8(88), all8(88), x);
    Float8 shifted = x * all8(1.44269504f) + all8(12582912); /* the last bits hold the nearest power of two */
    Float8 power = shifted - all8(12582912);
    Float8 rest = x - power * all8(0.693145752f) - power * all8(1.42860677e-6f);
    Float8 sum = all8(1.0f / 720);
    sum = sum * rest + all8(1.0f / 120);
    sum = sum * rest + all8(1.0f / 24);
    sum = sum * rest + all8(1.0f / 6);
    sum = sum * rest + all8(0.5f);
    sum = sum * rest + all8(1);
    sum = sum * rest + all8(1);
    return (Float8)((Int8)sum + ((Int8)shifted << 23));
}

INLINE Float8 silu8(Float8 x) { return x / (all8(1) + exp8(-x)); }

INLINE void prefetch(const ELEMENT *from, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(ELEMENT)) __builtin_prefetch(from + i);
}
