/* Products with weights in panels. The sums of TILE rows fill most registers. N rows, I inputs, O outputs. */

#pragma once
#include "numbers.h"
#include "panels.h"
#include "rows.h"

#define BLOCK 48
#define AHEAD (8192 / sizeof(ELEMENT)) /* prefetch distance of a single tile, in weights */

#if STEP == 2
typedef ELEMENT INPUT;
typedef __m512bh Weights;
INLINE Weights load_weights(const ELEMENT *from) { return (Weights)_mm512_loadu_si512(from); }
INLINE Floats add_products(Floats sum, const INPUT *inputs, Weights weights) {
    int32_t pair;
    __builtin_memcpy(&pair, inputs, sizeof pair);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, weights, (__m512bh)_mm512_set1_epi32(pair));
}
#else
typedef float INPUT;
typedef Floats Weights;
INLINE Weights load_weights(const ELEMENT *from) { return load_lanes(from); }
INLINE Floats add_products(Floats sum, const INPUT *inputs, Weights weights) { return sum + *inputs * weights; }
#endif

/* Returns rows as `product` reads them, converted in `memory` if necessary. */
INLINE const INPUT *inputs_of(const ELEMENT *rows, float *memory, long count) {
#if defined(BFLOAT16) && STEP == 1
    for (long i = 0; i < count; i += 8) *(Float8 *)(memory + i) = load(rows + i);
    return memory;
#else
    return rows;
#endif
}

const long input_size = sizeof(INPUT);

/* Whether these products are faster than oneDNN's, which uses AMX for bfloat16. */
#if defined(BFLOAT16) && defined(__AMX_BF16__)
const long multiplies = 0;
#else
const long multiplies = 1;
#endif

INLINE void tile(int rows, const INPUT *x, const ELEMENT *panel, const ELEMENT *next, float *line, long I) {
    Floats sums[TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (Floats){0};
    for (long i = 0; i < I; i += STEP, panel += STEP * PANEL) {
        Weights left = load_weights(panel), right = load_weights(panel + STEP * LANES);
        if (next) {
            __builtin_prefetch(next + i * PANEL);
            if (STEP * LANES * sizeof(ELEMENT) == 64) __builtin_prefetch(next + i * PANEL + STEP * LANES);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums[r][0] = add_products(sums[r][0], x + r * I + i, left);
            sums[r][1] = add_products(sums[r][1], x + r * I + i, right);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        *(Floats *)(line + r * PANEL) = sums[r][0];
        *(Floats *)(line + r * PANEL + LANES) = sums[r][1];
    }
}

/* Adds bias and residual (0: none) to a tile's sums, or multiplies silu(left half) by the right half. */
static void finish(float *line, const ELEMENT *bias, const ELEMENT *residual, ELEMENT *out, long rows, long width,
                   long stride, long gated) {
    for (long r = 0; r < rows; r++, line += PANEL, out += stride) {
        for (long j = 0; bias && j < PANEL; j += 8) *(Float8 *)(line + j) += load(bias + j);
        if (gated) {
            for (long j = 0; j < LANES; j += 8)
                store(out + j, silu8(*(Float8 *)(line + j)) * *(Float8 *)(line + LANES + j));
            continue;
        }
        ELEMENT part[PANEL] = {0}, *to = width == PANEL ? out : part;
        const ELEMENT *added = residual ? residual + r * stride : part;
        if (residual && width < PANEL) { /* in the last panel of a row, nothing beyond its outputs is read or written */
            for (long j = 0; j < width; j++) part[j] = added[j];
            added = part;
        }
        for (long j = 0; j < PANEL; j += 8) store(to + j, *(Float8 *)(line + j) + load(added + j));
        if (width < PANEL)
            for (long j = 0; j < width; j++) out[j] = part[j];
    }
}

#define CASE(count) case count: tile(count, x + from * I, panel, next, line, I); break;

/* out [N, O] = x [N, I] times the packed weight, then `finish`. bias is in panel order. */
void product(const INPUT *x, const ELEMENT *weight, const ELEMENT *bias, const ELEMENT *residual, ELEMENT *out, long N,
             long I, long O, long gated, long threads) {
    long panels = (O + PANEL - 1) / PANEL, stride = gated ? O / 2 : O;
    for (long start = 0; start < N; start += BLOCK) {
        long rows = N - start < BLOCK ? N - start : BLOCK, tiles = (rows + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long p = 0; p < panels; p++) {
            const ELEMENT *panel = weight + p * PANEL * I;
            long width = O - p * PANEL < PANEL ? O - p * PANEL : PANEL, column = p * (gated ? LANES : PANEL);
            for (long t = 0; t < tiles; t++) {
                long from = start + rows * t / tiles, count = start + rows * (t + 1) / tiles - from;
                float line[TILE * PANEL];
                const ELEMENT *next = tiles == 1 ? (rows > 1 ? panel + AHEAD : 0) : t == tiles - 1 ? panel + PANEL * I : 0;
                switch (count) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE > 6
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
                }
                finish(line, bias ? bias + p * PANEL : 0, residual ? residual + from * stride + column : 0,
                       out + from * stride + column, count, width, stride, gated);
            }
        }
    }
}
