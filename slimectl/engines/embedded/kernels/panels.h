/* Weights in panels, the layout that products read.

   A panel has PANEL outputs: STEP inputs of each output, then the next STEP inputs of each, and so on. A gated panel has LANES
   outputs of each half. The STEP inputs of one output are a cell. O outputs, I inputs, R rows of a weight (one per output). */

#pragma once
#include "numbers.h"

#define PANEL (2 * LANES)
#define WIDE_AHEAD 64 /* prefetch distance while rounding a row, in float32 numbers */
#define STREAMED 65536 /* weights of at least so many cells do not fit in the cache and bypass it */

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define STEP 2 /* one instruction adds two products */
#else
#define STEP 1
#endif
/* SIDE cells fill a register. SIDE x SIDE cells are transposed at a time. */
#if defined(BFLOAT16) && STEP == 1
#define SIDE 8
typedef uint16_t CELL;
#else
#define SIDE LANES
typedef int32_t CELL;
#endif
typedef CELL Cells __attribute__((vector_size(SIDE * sizeof(CELL)), aligned(sizeof(CELL)), may_alias));

const long panel_outputs = PANEL, inputs_a_step = STEP;

/* Returns the index of the first cell of an output. */
INLINE long place_of(long output, long O, long cells, long gated) {
    long half = gated && output >= O / 2, row = output - half * (O / 2), width = gated ? LANES : PANEL;
    return row / width * PANEL * cells + row % width + half * LANES;
}

/* Returns how many of the `left` outputs from this one on are packed at a time: enough to fill cache lines, SIDE, or 1. For wide
   numbers, more than SIDE rows at a time are slower even if they fill cache lines. */
INLINE long run_of(long output, long left, long O, long gated, int wide) {
    long half = gated && output >= O / 2, row = output - half * (O / 2);
    long width = wide || SIDE * sizeof(CELL) >= 64 ? SIDE : gated ? LANES : PANEL;
    if (row % width == 0 && left >= width) return width;
    return row % SIDE == 0 && left >= SIDE ? SIDE : 1;
}

/* Interleaves each row of the first half with one of the second half. Doing so log2(SIDE) times transposes. */
INLINE void interleave(const Cells *rows, Cells *to) {
#pragma GCC unroll 8
    for (int i = 0; i < SIDE / 2; i++) {
        Cells left = rows[i], right = rows[i + SIDE / 2];
#if SIDE == 16
        to[2 * i] = __builtin_shufflevector(left, right, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        to[2 * i + 1] = __builtin_shufflevector(left, right, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
        to[2 * i] = __builtin_shufflevector(left, right, 0, 8, 1, 9, 2, 10, 3, 11);
        to[2 * i + 1] = __builtin_shufflevector(left, right, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
    }
}

INLINE void transpose(Cells *rows) {
    Cells other[SIDE];
    interleave(rows, other);
    interleave(other, rows);
    interleave(rows, other);
#if SIDE == 16
    interleave(other, rows);
#else
    for (int i = 0; i < SIDE; i++) rows[i] = other[i];
#endif
}

INLINE void stream(CELL *to, Cells x) {
#if SIDE == 16
    _mm512_stream_si512((void *)to, (__m512i)x);
#else
    __m128i parts[sizeof x / 16];
    __builtin_memcpy(parts, &x, sizeof x);
    for (unsigned i = 0; i < sizeof x / 16; i++) _mm_stream_si128((__m128i *)to + i, parts[i]);
#endif
}

/* Return one cell, or SIDE cells, of a row of elements or (wide) of float32 numbers, which are rounded. */
INLINE CELL cell_at(const void *row, long c, int wide) {
    if (!wide) return ((const CELL *)row)[c];
    uint16_t parts[2];
    for (int i = 0; i < STEP; i++) parts[i] = rounded8(all8(((const float *)row)[c * STEP + i]))[0];
    CELL cell;
    __builtin_memcpy(&cell, parts, sizeof cell);
    return cell;
}
INLINE Cells cells_at(const void *row, long c, int wide) {
    if (!wide) return *(const Cells *)((const CELL *)row + c);
    const float *from = (const float *)row + c * STEP;
    for (unsigned i = 0; i < SIDE * STEP; i += 64 / sizeof *from) __builtin_prefetch(from + WIDE_AHEAD + i);
#if STEP == 2
    Floats low = *(const Floats *)from, high = *(const Floats *)(from + LANES);
    Floats even = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    Floats odd = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return (Cells)((rounded_bits(even) >> 16) | (rounded_bits(odd) & 0xffff0000));
#elif defined(BFLOAT16)
    return (Cells)rounded8(*(const Float8 *)from);
#else
    return *(const Cells *)from;
#endif
}

INLINE void pack_rows(const char *rows, int wide, CELL *panels, long first, long R, long O, long cells, long gated) {
    long width = cells * (wide ? STEP * sizeof(float) : sizeof(CELL));
    int large = R * cells >= STREAMED && (uintptr_t)panels % 64 == 0;
    for (long r = 0, n; r < R; r += n, rows += n * width) {
        n = run_of(first + r, R - r, O, gated, wide);
        CELL *to = panels + place_of(first + r, O, cells, gated);
        int streams = large && (n * sizeof(CELL) >= 64 || n == PANEL); /* else only parts of cache lines */
        long c = 0;
        if (n >= SIDE)
            for (; c + SIDE <= cells; c += SIDE)
                for (long j = 0; j < n; j += SIDE) {
                    Cells block[SIDE];
#pragma GCC unroll 16
                    for (int i = 0; i < SIDE; i++) block[i] = cells_at(rows + (j + i) * width, c, wide);
                    transpose(block);
#pragma GCC unroll 16
                    for (int i = 0; i < SIDE; i++) {
                        if (streams) stream(to + (c + i) * PANEL + j, block[i]);
                        else *(Cells *)(to + (c + i) * PANEL + j) = block[i];
                    }
                }
        for (; c < cells; c++)
            for (long j = 0; j < n; j++) to[c * PANEL + j] = cell_at(rows + j * width, c, wide);
    }
    if (large) _mm_sfence();
}

/* Packs rows of a weight of O outputs, starting at output `first`. If wide, the rows are float32 and are rounded. */
void pack(const void *rows, long wide, CELL *panels, long first, long R, long O, long cells, long gated) {
    if (wide && sizeof(ELEMENT) == 2) pack_rows(rows, 1, panels, first, R, O, cells, gated);
    else pack_rows(rows, 0, panels, first, R, O, cells, gated);
}

/* Reverses `pack`: writes the weights to `rows`. */
void unpack(const CELL *panels, CELL *rows, long first, long R, long O, long cells, long gated) {
    for (long r = 0, n; r < R; r += n, rows += n * cells) {
        n = run_of(first + r, R - r, O, gated, 0);
        const CELL *from = panels + place_of(first + r, O, cells, gated);
        long c = 0;
        if (n >= SIDE)
            for (; c + SIDE <= cells; c += SIDE)
                for (long j = 0; j < n; j += SIDE) {
                    Cells block[SIDE];
#pragma GCC unroll 16
                    for (int i = 0; i < SIDE; i++) block[i] = *(const Cells *)(from + (c + i) * PANEL + j);
                    transpose(block);
#pragma GCC unroll 16
                    for (int i = 0; i < SIDE; i++) *(Cells *)(rows + (j + i) * cells + c) = block[i];
                }
        for (; c < cells; c++)
            for (long j = 0; j < n; j++) rows[j * cells + c] = from[c * PANEL + j];
    }
}

/* Writes the weights of some outputs to `rows` [N, cells]. The panels must not be gated. */
void gather(const CELL *panels, const int64_t *outputs, CELL *rows, long N, long O, long cells) {
    for (long row = 0; row < N; row++, rows += cells) {
        const CELL *from = panels + place_of(outputs[row], O, cells, 0);
        for (long c = 0; c < cells; c++) rows[c] = from[c * PANEL];
    }
}

/* Packs only the numbers at the ascending `places` of rows [R, I]. The first row belongs to output `first`. */
void repack(const ELEMENT *rows, ELEMENT *panels, const int64_t *places, long count, long first, long O, long I, long gated) {
    long r = 0;
    for (long n = 0; n < count; n++) {
        while (places[n] >= (r + 1) * I) r++;
        long i = places[n] - r * I, cell = place_of(first + r, O, I / STEP, gated) + i / STEP * PANEL;
        panels[cell * STEP + i % STEP] = rows[places[n]];
    }
}
