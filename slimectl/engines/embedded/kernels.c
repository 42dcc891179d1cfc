/* What a decoding step of the embedded engine computes, for CPUs; native.py compiles and calls it.

   Every row is computed by the same operations in the same order, whatever rows are beside it.
   Numbers are float32 in registers; ELEMENT is what tensors hold: float32, or bfloat16 if BFLOAT16 is defined.
   N rows, I inputs, O outputs, E hidden size, H query heads, K key-value heads, D head dimension; E and I are multiples of 8, D of 16,
   T token capacity of a slot. */

#include <emmintrin.h>
#include <stdint.h>

typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Float4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Int8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t UInt8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Short8 __attribute__((vector_size(16), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

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
#else
typedef float ELEMENT;
INLINE Float8 load(const ELEMENT *from) { return *(const Float8 *)from; }
INLINE void store(ELEMENT *to, Float8 x) { *(Float8 *)to = x; }
#endif

INLINE Float8 all8(float x) { return (Float8){x, x, x, x, x, x, x, x}; }
INLINE Float8 either(Int8 mask, Float8 x, Float8 y) { return (Float8)(((Int8)x & mask) | ((Int8)y & ~mask)); }

INLINE float sum8(Float8 x) {
    Float4 half = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
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

INLINE void scores_of(const float *query, const ELEMENT *keys, float *scores, long G, long tokens, long D) {
    for (long t = 0; t < tokens; t++, keys += D)
        for (long g = 0; g < G; g++) {
            Float8 sum = all8(0);
            for (long d = 0; d < D; d += 8) sum += *(const Float8 *)(query + g * D + d) * load(keys + d);
            scores[g * tokens + t] = sum8(sum);
        }
}

/* Turns scores into weights that sum to the returned number. */
INLINE float soften(float *scores, long tokens) {
    float highest = scores[0], total = 0;
    for (long t = 1; t < tokens; t++) highest = scores[t] > highest ? scores[t] : highest;
    Float8 totals = all8(0);
    long t = 0;
    for (; t + 8 <= tokens; t += 8) {
        Float8 weight = exp8(*(Float8 *)(scores + t) - all8(highest));
        *(Float8 *)(scores + t) = weight;
        totals += weight;
    }
    for (; t < tokens; t++) total += scores[t] = exp8(all8(scores[t] - highest))[0];
    return total + sum8(totals);
}

INLINE void weigh(const float *weights, float total, const ELEMENT *values, ELEMENT *out, long tokens, long D, long width) {
    Float8 sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < width; i++) sums[i] = all8(0);
    for (long t = 0; t < tokens; t++, values += D) {
        Float8 weight = all8(weights[t]);
#pragma GCC unroll 8
        for (int i = 0; i < width; i++) sums[i] += weight * load(values + 8 * i);
    }
#pragma GCC unroll 8
    for (int i = 0; i < width; i++) store(out + 8 * i, sums[i] * all8(1 / total));
}

/* Writes the keys and values of one new token of each slot at its position, and attends from it to the slot's tokens.
   qkv is [N, H + 2K, D], `cache` the keys and at `values_at` the values [N, K, T, D], out [N, H, D]; `scratch` has
   H / K * (D + T) numbers for each thread. */
INLINE void attend_head(const ELEMENT *qkv, ELEMENT *cache, const int64_t *positions, ELEMENT *out, float *query,
                        float scale, long pair, long H, long K, long D, long T, long values_at) {
    long row = pair / K, head = pair % K, position = positions[row], tokens = position + 1, G = H / K;
    const ELEMENT *token = qkv + row * (H + 2 * K) * D;
    ELEMENT *keys = cache + pair * T * D, *values = keys + values_at;
    for (long d = 0; d < D; d += 8) {
        store(keys + position * D + d, load(token + (H + head) * D + d));
        store(values + position * D + d, load(token + (H + K + head) * D + d));
    }
    float *scores = query + G * D;
    for (long d = 0; d < G * D; d += 8) *(Float8 *)(query + d) = load(token + head * G * D + d) * all8(scale);
    if (D == 64) scores_of(query, keys, scores, G, tokens, 64);
    else if (D == 128) scores_of(query, keys, scores, G, tokens, 128);
    else scores_of(query, keys, scores, G, tokens, D);
    for (long g = 0; g < G; g++) {
        float *weights = scores + g * tokens, total = soften(weights, tokens);
        ELEMENT *to = out + (row * H + head * G + g) * D;
        long d = 0;
        for (; d + 64 <= D; d += 64) weigh(weights, total, values + d, to + d, tokens, D, 8);
        for (; d + 32 <= D; d += 32) weigh(weights, total, values + d, to + d, tokens, D, 4);
        for (; d < D; d += 8) weigh(weights, total, values + d, to + d, tokens, D, 1);
    }
}

void attend(const ELEMENT *qkv, ELEMENT *cache, const int64_t *positions, ELEMENT *out, float *scratch, float scale,
            long N, long H, long K, long D, long T, long values_at, long threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long thread = 0; thread < threads; thread++)
        for (long pair = N * K * thread / threads; pair < N * K * (thread + 1) / threads; pair++)
            attend_head(qkv, cache, positions, out, scratch + thread * (H / K) * (D + T), scale, pair, H, K, D, T,
                        values_at);
}

/* Weights are packed in panels of PANEL outputs, input after input; a gated panel has outputs of both halves. */
#define PANEL 16
#define TILE 6
#define BLOCK 48

#define STREAMED 65536 /* numbers from which panels go to memory past the cache, which holds no more of them */

#ifdef BFLOAT16
typedef Short8 Element8;
#else
typedef Float8 Element8;
#endif

/* Interleaves row i with row i + 4; three times over, 8 x 8 numbers are transposed. */
INLINE void interleave(const Element8 *rows, Element8 *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to[2 * i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        to[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
}

INLINE void stream8(ELEMENT *to, Element8 x) {
    __m128i parts[sizeof x / 16];
    __builtin_memcpy(parts, &x, sizeof x);
    for (unsigned i = 0; i < sizeof x / 16; i++) _mm_stream_si128((__m128i *)to + i, parts[i]);
}

/* Transposes 8 outputs of 8 inputs into a panel. */
INLINE void pack_block(const ELEMENT *from, ELEMENT *to, long I, int streams) {
    Element8 rows[8], other[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) rows[j] = *(const Element8 *)(from + j * I);
    interleave(rows, other);
    interleave(other, rows);
    interleave(rows, other);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (streams) stream8(to + i * PANEL, other[i]);
        else *(Element8 *)(to + i * PANEL) = other[i];
    }
}

void pack(const ELEMENT *weight, ELEMENT *panels, long O, long I, long gated) {
    int streams = O * I >= STREAMED && (uintptr_t)panels % 16 == 0;
    for (long first = 0; first < O; first += PANEL) {
        const ELEMENT *left = weight + (gated ? first / 2 : first) * I, *right = left + (gated ? O / 2 : PANEL / 2) * I;
        ELEMENT *to = panels + first * I;
        long i = 0;
        if (first + PANEL <= O)
            for (; i + 8 <= I; i += 8) {
                pack_block(left + i, to + i * PANEL, I, streams);
                pack_block(right + i, to + i * PANEL + 8, I, streams);
            }
        for (; i < I; i++)
            for (long j = 0; j < PANEL; j++) {
                const ELEMENT *half = j < 8 ? left + j * I : right + (j - 8) * I;
                to[i * PANEL + j] = gated || first + j < O ? half[i] : 0;
            }
    }
    if (streams) _mm_sfence();
}

/* Does the same with the numbers at `places` of a weight alone, which are ascending. */
void repack(const ELEMENT *weight, ELEMENT *panels, const int64_t *places, long count, long O, long I, long gated) {
    long o = 0;
    for (long c = 0; c < count; c++) {
        while (places[c] >= (o + 1) * I) o++;
        long half = gated && o >= O / 2, row = gated ? o - half * (O / 2) : o;
        long first = gated ? row / 8 * PANEL : row / PANEL * PANEL, j = gated ? row % 8 + 8 * half : row % PANEL;
        panels[first * I + (places[c] - o * I) * PANEL + j] = weight[places[c]];
    }
}

INLINE void tile(int rows, const float *x, const ELEMENT *panel, const ELEMENT *next, float *line, long I) {
    Float8 sums[TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = all8(0);
    for (long i = 0; i < I; i++, panel += PANEL) {
        Float8 left = load(panel), right = load(panel + 8);
        if (next) __builtin_prefetch(next + i * PANEL);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            Float8 input = all8(x[r * I + i]);
            sums[r][0] += input * left;
            sums[r][1] += input * right;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        *(Float8 *)(line + r * PANEL) = sums[r][0];
        *(Float8 *)(line + r * PANEL + 8) = sums[r][1];
    }
}

/* Adds bias and residual (0: none) to a tile's sums, or multiplies silu of their left half with the right one. */
static void finish(const float *line, const ELEMENT *bias, const ELEMENT *residual, ELEMENT *out, long rows,
                   long width, long stride, long gated) {
    for (long r = 0; r < rows; r++, line += PANEL) {
        Float8 left = *(const Float8 *)line, right = *(const Float8 *)(line + 8);
        if (bias) left += load(bias), right += load(bias + 8);
        if (gated) {
            store(out + r * stride, silu8(left) * right);
            continue;
        }
        ELEMENT part[PANEL] = {0}, *to = width == PANEL ? out + r * stride : part;
        const ELEMENT *added = residual ? residual + r * stride : part;
        if (residual && width < PANEL) { /* the last panel of a row: nothing is read or written behind its outputs */
            for (long j = 0; j < width; j++) part[j] = added[j];
            added = part;
        }
        store(to, left + load(added));
        store(to + 8, right + load(added + 8));
        if (width < PANEL)
            for (long j = 0; j < width; j++) out[r * stride + j] = part[j];
    }
}

/* out [N, O] = x [N, I] times the packed weight, and what `finish` does; x is float32, and bias packed, too. */
void product(const float *x, const ELEMENT *weight, const ELEMENT *bias, const ELEMENT *residual, ELEMENT *out, long N,
             long I, long O, long gated, long threads) {
    long panels = (O + PANEL - 1) / PANEL, stride = gated ? O / 2 : O;
    for (long start = 0; start < N; start += BLOCK) {
        long rows = N - start < BLOCK ? N - start : BLOCK, tiles = (rows + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long p = 0; p < panels; p++) {
            const ELEMENT *panel = weight + p * PANEL * I;
            long width = O - p * PANEL < PANEL ? O - p * PANEL : PANEL, column = p * (gated ? PANEL / 2 : PANEL);
            for (long t = 0; t < tiles; t++) {
                long from = start + rows * t / tiles, count = start + rows * (t + 1) / tiles - from;
                float line[TILE * PANEL];
                const float *in = x + from * I;
                const ELEMENT *next = tiles > 1 && t == tiles - 1 ? panel + PANEL * I : 0;
                switch (count) {
                case 1: tile(1, in, panel, next, line, I); break;
                case 2: tile(2, in, panel, next, line, I); break;
                case 3: tile(3, in, panel, next, line, I); break;
                case 4: tile(4, in, panel, next, line, I); break;
                case 5: tile(5, in, panel, next, line, I); break;
                case 6: tile(6, in, panel, next, line, I); break;
                }
                finish(line, bias ? bias + p * PANEL : 0, residual ? residual + from * stride + column : 0,
                       out + from * stride + column, count, width, stride, gated);
            }
        }
    }
}
