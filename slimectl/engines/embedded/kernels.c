/* What a decoding step of the embedded engine computes, for CPUs; native.py compiles and calls it.

   Every row is computed by the same operations in the same order, whatever rows are beside it.
   Numbers are float32 in registers; ELEMENT is what tensors hold: float32, or bfloat16 if BFLOAT16 is defined.
   N rows, I inputs, O outputs, E hidden size, H query heads, K key-value heads, D head dimension; E and I are multiples of 8, D of 16,
   T token capacity of a slot. */

#include <immintrin.h>
#include <stdint.h>

/* LANES numbers fill a register; attention computes HEADS query heads at once, products TILE rows. */
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
#define LOWEST -3.4e38f

#ifdef BFLOAT16
typedef uint16_t ELEMENT;
INLINE Float8 load(const ELEMENT *from) {
    return (Float8)(__builtin_convertvector(*(const Short8 *)from, UInt8) << 16);
}
INLINE void store(ELEMENT *to, Float8 x) {
    UInt8 bits = (UInt8)x;
    bits += 0x7fff + ((bits >> 16) & 1); /* to the nearest, ties to even */
    *(Short8 *)to = __builtin_convertvector(bits >> 16, Short8);
}
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

INLINE Float8 all8(float x) { return (Float8){x, x, x, x, x, x, x, x}; }
INLINE Float8 either(Int8 mask, Float8 x, Float8 y) { return (Float8)(((Int8)x & mask) | ((Int8)y & ~mask)); }

INLINE float sum8(Float8 x) {
    Float4 half = low4(x) + high4(x);
    half += __builtin_shufflevector(half, half, 2, 3, 0, 1);
    return half[0] + half[1];
}

/* e^x to two units in the last place; x above 88 counts as 88, below -87 as -87. */
INLINE Float8 exp8(Float8 x) {
    x = either(x < all8(-87), all8(-87), x);
    x = either(x > all8(88), all8(88), x);
    Float8 shifted = x * all8(1.44269504f) + all8(12582912); /* its last bits are the nearest power of two */
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

INLINE void normalize(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, long E, float eps) {
    Float8 squares = all8(0);
    for (long e = 0; e < E; e += 8) squares += load(x + e) * load(x + e);
    Float8 scale = all8(1 / __builtin_sqrtf(sum8(squares) / E + eps));
    for (long e = 0; e < E; e += 8) store(out + e, load(x + e) * scale * load(weight + e));
}

/* out [N, E] = x / rms(x) * weight */
void rms_norm(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, long N, long E, float eps) {
    for (long row = 0; row < N; row++) normalize(x + row * E, weight, out + row * E, E, eps);
}

/* Does the same in place with the first `normed` of `heads` heads of every row; weight is [normed, D]. */
void norm_heads(ELEMENT *x, const ELEMENT *weight, long N, long normed, long heads, long D, float eps) {
    for (long row = 0; row < N; row++)
        for (long head = 0; head < normed; head++) {
            ELEMENT *at = x + (row * heads + head) * D;
            normalize(at, weight + head * D, at, D, eps);
        }
}

/* Rotates the first `rotated` of `heads` heads of every row; the first half of the sines carries the minus. */
void rotate(ELEMENT *x, const ELEMENT *cosines, const ELEMENT *sines, long N, long rotated, long heads, long D) {
    long half = D / 2;
    for (long row = 0; row < N; row++, cosines += D, sines += D) {
        for (long head = 0; head < rotated; head++) {
            ELEMENT *first = x + (row * heads + head) * D;
            for (long d = 0; d < half; d += 8) {
                Float8 low = load(first + d), high = load(first + half + d);
                store(first + d, low * load(cosines + d) + high * load(sines + d));
                store(first + half + d, high * load(cosines + half + d) + low * load(sines + half + d));
            }
        }
    }
}

/* out [N, I] = silu(the first half of a row) * the second half */
void silu_product(const ELEMENT *x, ELEMENT *out, long N, long I) {
    for (long row = 0; row < N; row++, x += 2 * I, out += I)
        for (long i = 0; i < I; i += 8) store(out + i, silu8(load(x + i)) * load(x + I + i));
}

INLINE void prefetch(const ELEMENT *from, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(ELEMENT)) __builtin_prefetch(from + i);
}

/* Return the sums of four registers. */
INLINE Float4 sums4(const Floats *x) {
    Float4 parts[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) parts[j] = low4(halves_sum(x[j])) + high4(halves_sum(x[j]));
    Float4 low = __builtin_shufflevector(parts[0], parts[1], 0, 4, 1, 5) + __builtin_shufflevector(parts[0], parts[1], 2, 6, 3, 7);
    Float4 high = __builtin_shufflevector(parts[2], parts[3], 0, 4, 1, 5) + __builtin_shufflevector(parts[2], parts[3], 2, 6, 3, 7);
    return __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
}

/* Adds to the scores [G, stride] what `width` dimensions of four keys, one after another, contribute. */
INLINE void add_scores(const float *query, const ELEMENT *const *keys, float *scores, long G, long stride, long D, int width) {
    Floats parts[4][64 / LANES];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
        for (int c = 0; c < width / LANES; c++) parts[j][c] = load_lanes(keys[j] + c * LANES);
    for (long g = 0; g < G; g++, query += D, scores += stride) {
        Floats sums[4] = {{0}};
#pragma GCC unroll 8
        for (int c = 0; c < width / LANES; c++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[j] += *(const Floats *)(query + c * LANES) * parts[j][c];
        *(Float4 *)scores += sums4(sums);
    }
}

/* scores [G, stride] = query [G, D] times keys [tokens, D]; behind the tokens, up to a multiple of 8, they are lowest.
   Fetches the values meanwhile. */
INLINE void scores_of(const float *query, const ELEMENT *keys, const ELEMENT *values, float *scores, long G, long tokens,
                      long stride, long D) {
    for (long t = 0; t < tokens; t += 4) {
        prefetch(values + t * D, 4 * D);
        const ELEMENT *four[4];
        for (int j = 0; j < 4; j++) four[j] = keys + (t + j < tokens ? t + j : tokens - 1) * D;
        for (long g = 0; g < G; g++) *(Float4 *)(scores + g * stride + t) = (Float4){0};
        long d = 0;
        for (; d + 64 <= D; d += 64) {
            add_scores(query + d, four, scores + t, G, stride, D, 64);
            for (int j = 0; j < 4; j++) four[j] += 64;
        }
        for (; d < D; d += 16) {
            add_scores(query + d, four, scores + t, G, stride, D, 16);
            for (int j = 0; j < 4; j++) four[j] += 16;
        }
    }
    for (long g = 0; g < G; g++)
        for (long t = tokens; t % 8; t++) scores[g * stride + t] = LOWEST;
}

/* Turns scores, of which there are a multiple of 8, into weights that sum to 1. */
INLINE void soften(float *scores, long tokens) {
    Float8 highest8 = *(Float8 *)scores, totals = all8(0);
    for (long t = 8; t < tokens; t += 8) {
        Float8 score = *(Float8 *)(scores + t);
        highest8 = either(score > highest8, score, highest8);
    }
    float highest = highest8[0];
    for (int j = 1; j < 8; j++) highest = highest8[j] > highest ? highest8[j] : highest;
    for (long t = 0; t < tokens; t += 8) {
        Float8 weight = exp8(*(Float8 *)(scores + t) - all8(highest));
        *(Float8 *)(scores + t) = weight;
        totals += weight;
    }
    Float8 scale = all8(1 / sum8(totals));
    for (long t = 0; t < tokens; t += 8) *(Float8 *)(scores + t) *= scale;
}

/* Sums values [tokens, D] by the weights [heads, stride] of some heads, `vectors` registers of dimensions of each.
   Fetches as much from `next` meanwhile (0: nothing). */
INLINE void weigh(const float *weights, const ELEMENT *values, const ELEMENT *next, ELEMENT *out, long tokens, long stride,
                  long D, int heads, int vectors) {
    Floats sums[4][4] = {{{0}}};
    for (long t = 0; t < tokens; t++, values += D) {
        if (next) prefetch(next + t * D, vectors * LANES);
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            Floats value = load_lanes(values + c * LANES);
#pragma GCC unroll 4
            for (int g = 0; g < heads; g++) sums[g][c] += weights[g * stride + t] * value;
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) store_lanes(out + g * D + c * LANES, sums[g][c]);
}

INLINE void weigh_heads(const float *weights, const ELEMENT *values, const ELEMENT *next, ELEMENT *out, long tokens,
                        long stride, long D, int heads) {
    long d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES)
        weigh(weights, values + d, next ? next + d : 0, out + d, tokens, stride, D, heads, 4);
    for (; d < D; d += LANES) weigh(weights, values + d, next ? next + d : 0, out + d, tokens, stride, D, heads, 1);
}

/* Writes the keys and values of one new token of each slot at its position, and attends from it to the slot's tokens.
   qkv is [N, H + 2K, D], `cache` the keys and at `values_at` the values [N, K, T, D], out [N, H, D]; `scratch` has
   H / K * (D + T + 8) numbers for each thread. */
INLINE void attend_head(const ELEMENT *qkv, ELEMENT *cache, const int64_t *positions, ELEMENT *out, float *query,
                        float scale, long pair, long last, long H, long K, long D, long T, long values_at) {
    long row = pair / K, head = pair % K, position = positions[row], tokens = position + 1, G = H / K, stride = T + 8;
    const ELEMENT *token = qkv + row * (H + 2 * K) * D;
    ELEMENT *keys = cache + pair * T * D, *values = keys + values_at;
    for (long d = 0; d < D; d += 8) {
        store(keys + position * D + d, load(token + (H + head) * D + d));
        store(values + position * D + d, load(token + (H + K + head) * D + d));
    }
    float *scores = query + G * D;
    for (long d = 0; d < G * D; d += 8) *(Float8 *)(query + d) = load(token + head * G * D + d) * all8(scale);
    if (D == 64) scores_of(query, keys, values, scores, G, tokens, stride, 64);
    else if (D == 128) scores_of(query, keys, values, scores, G, tokens, stride, 128);
    else scores_of(query, keys, values, scores, G, tokens, stride, D);
    for (long g = 0; g < G; g++) soften(scores + g * stride, (tokens + 7) / 8 * 8);
    for (long g = 0; g < G;) {
        const float *weights = scores + g * stride;
        const ELEMENT *next = g == 0 && pair < last ? keys + T * D : 0; /* the keys of the next pair */
        ELEMENT *to = out + (row * H + head * G + g) * D;
        long heads = G - g < HEADS ? G - g : HEADS;
        switch (heads) {
        case 1: weigh_heads(weights, values, next, to, tokens, stride, D, 1); break;
        case 2: weigh_heads(weights, values, next, to, tokens, stride, D, 2); break;
        case 3: weigh_heads(weights, values, next, to, tokens, stride, D, 3); break;
        case 4: weigh_heads(weights, values, next, to, tokens, stride, D, 4); break;
        }
        g += heads;
    }
}

void attend(const ELEMENT *qkv, ELEMENT *cache, const int64_t *positions, ELEMENT *out, float *scratch, float scale,
            long N, long H, long K, long D, long T, long values_at, long threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long thread = 0; thread < threads; thread++) {
        float *query = scratch + thread * (H / K) * (D + T + 8);
        long end = N * K * (thread + 1) / threads;
        for (long pair = N * K * thread / threads; pair < end; pair++)
            attend_head(qkv, cache, positions, out, query, scale, pair, end - 1, H, K, D, T, values_at);
    }
}

/* Products. Weights are packed in panels of PANEL outputs: STEP inputs of every output of the panel, then the next STEP;
   a gated panel has LANES outputs of each half. The sums of TILE rows fill most registers. */
#define PANEL (2 * LANES)
#define BLOCK 48
#define AHEAD (8192 / sizeof(ELEMENT)) /* weights from those that a single tile reads to those that it fetches meanwhile */

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define STEP 2 /* one instruction adds the products of two inputs */
typedef ELEMENT INPUT;
typedef __m512bh Weights;
INLINE Weights load_weights(const ELEMENT *from) { return (Weights)_mm512_loadu_si512(from); }
INLINE Floats add_products(Floats sum, const INPUT *inputs, Weights weights) {
    int32_t pair;
    __builtin_memcpy(&pair, inputs, sizeof pair);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, weights, (__m512bh)_mm512_set1_epi32(pair));
}
#else
#define STEP 1
typedef float INPUT;
typedef Floats Weights;
INLINE Weights load_weights(const ELEMENT *from) { return load_lanes(from); }
INLINE Floats add_products(Floats sum, const INPUT *inputs, Weights weights) { return sum + *inputs * weights; }
#endif

const long panel_outputs = PANEL, inputs_a_step = STEP, input_size = sizeof(INPUT);

/* STEP inputs of an output, which packing moves as one. */
#if defined(BFLOAT16) && STEP == 1
typedef uint16_t CELL;
typedef Short8 Cells8;
#else
typedef int32_t CELL;
typedef Int8 Cells8;
#endif
#define STREAMED 65536 /* cells from which panels go to memory past the cache, which holds no more of them */

/* Interleaves row i with row i + 4; three times over, 8 x 8 cells are transposed. */
INLINE void interleave(const Cells8 *rows, Cells8 *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to[2 * i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        to[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
}

INLINE void stream8(CELL *to, Cells8 x) {
    __m128i parts[sizeof x / 16];
    __builtin_memcpy(parts, &x, sizeof x);
    for (unsigned i = 0; i < sizeof x / 16; i++) _mm_stream_si128((__m128i *)to + i, parts[i]);
}

/* Transposes 8 cells of 8 outputs into a panel. */
INLINE void pack_block(const CELL *from, CELL *to, long cells, int streams) {
    Cells8 rows[8], other[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) rows[j] = *(const Cells8 *)(from + j * cells);
    interleave(rows, other);
    interleave(other, rows);
    interleave(rows, other);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (streams) stream8(to + i * PANEL, other[i]);
        else *(Cells8 *)(to + i * PANEL) = other[i];
    }
}

/* The output at place j of the panel that begins with output `first`, or with half of them of each half. */
INLINE long output_at(long first, long j, long O, long gated) {
    if (!gated) return first + j;
    return first / 2 + (j < LANES ? j : O / 2 + j - LANES);
}

/* The weight is [O, cells]. */
void pack(const CELL *weight, CELL *panels, long O, long cells, long gated) {
    int streams = O * cells >= STREAMED && (uintptr_t)panels % 16 == 0;
    for (long first = 0; first < O; first += PANEL) {
        CELL *to = panels + first * cells;
        long c = 0;
        if (first + PANEL <= O)
            for (; c + 8 <= cells; c += 8)
                for (long j = 0; j < PANEL; j += 8)
                    pack_block(weight + output_at(first, j, O, gated) * cells + c, to + c * PANEL + j, cells, streams);
        for (; c < cells; c++)
            for (long j = 0; j < PANEL; j++) {
                long output = output_at(first, j, O, gated);
                to[c * PANEL + j] = output < O ? weight[output * cells + c] : 0;
            }
    }
    if (streams) _mm_sfence();
}

/* Does the same with the numbers at `places` of a weight [O, I] alone, which are ascending. */
void repack(const ELEMENT *weight, ELEMENT *panels, const int64_t *places, long count, long O, long I, long gated) {
    long o = 0;
    for (long c = 0; c < count; c++) {
        while (places[c] >= (o + 1) * I) o++;
        long half = gated && o >= O / 2, row = o - half * (O / 2), i = places[c] - o * I;
        long first = gated ? row / LANES * PANEL : row / PANEL * PANEL, j = gated ? row % LANES + half * LANES : row % PANEL;
        panels[first * I + (i / STEP * PANEL + j) * STEP + i % STEP] = weight[places[c]];
    }
}

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

/* Adds bias and residual (0: none) to a tile's sums, or multiplies silu of their left half with the right one. */
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
        if (residual && width < PANEL) { /* the last panel of a row: nothing is read or written behind its outputs */
            for (long j = 0; j < width; j++) part[j] = added[j];
            added = part;
        }
        for (long j = 0; j < PANEL; j += 8) store(to + j, *(Float8 *)(line + j) + load(added + j));
        if (width < PANEL)
            for (long j = 0; j < width; j++) out[j] = part[j];
    }
}

#define CASE(count) case count: tile(count, x + from * I, panel, next, line, I); break;

/* out [N, O] = x [N, I] times the packed weight, and what `finish` does; bias is in the order of the panels. */
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
                const ELEMENT *next = tiles == 1 ? panel + AHEAD : t == tiles - 1 ? panel + PANEL * I : 0;
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
