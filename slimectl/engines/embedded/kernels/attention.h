/* Attention of one new token per sequence, to the shared spans that it reads and to its slot of the cache.

   N rows, H query heads, K key-value heads, G query heads per key-value head, D head dimension, T token capacity of a slot. */

#pragma once
#include "numbers.h"

#define LOWEST -3.4e38f /* the score of padding */

/* Return the sums of four registers. */
INLINE Float4 sums4(const Floats *x) {
    Float4 parts[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) parts[j] = low4(halves_sum(x[j])) + high4(halves_sum(x[j]));
    Float4 low = __builtin_shufflevector(parts[0], parts[1], 0, 4, 1, 5) + __builtin_shufflevector(parts[0], parts[1], 2, 6, 3, 7);
    Float4 high = __builtin_shufflevector(parts[2], parts[3], 0, 4, 1, 5) + __builtin_shufflevector(parts[2], parts[3], 2, 6, 3, 7);
    return __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
}

/* Adds to the scores [G, stride] the contribution of `width` dimensions of four consecutive keys. */
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

/* Tokens that sequences share. `keys` points to the first layer and head. Heads are `head` numbers apart, and a layer's values
   follow its keys. */
typedef struct {
    const ELEMENT *keys;
    int64_t tokens, head;
} Span;

/* Spans that rows read before their slots. Row n reads spans first[n] to first[n + 1] (first 0: none) with at most `tokens`
   tokens. */
typedef struct {
    const Span *spans;
    const int64_t *first;
    int64_t tokens;
} Spans;

/* Keys and values [tokens, D] of a head. */
typedef struct {
    const ELEMENT *keys, *values;
    long tokens;
} Part;

/* scores [G, stride] = query [G, D] times keys [tokens, D]. Overwrites up to 3 scores after them. Prefetches the values. */
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
}

/* Softmax in place. The number of scores is a multiple of 8. */
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

/* Sums the values of parts, weighted by [heads, stride], for `vectors` registers of dimensions starting at d. Prefetches as
   much from `next` (0: nothing). */
INLINE void weigh(const float *weights, const Part *parts, long count, const ELEMENT *next, ELEMENT *out, long stride,
                  long D, long d, int heads, int vectors) {
    Floats sums[4][4] = {{{0}}};
    for (long p = 0; p < count; weights += parts[p++].tokens) {
        const ELEMENT *values = parts[p].values + d;
        for (long t = 0; t < parts[p].tokens; t++, values += D) {
            if (next && p == count - 1) prefetch(next + t * D + d, vectors * LANES);
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) {
                Floats value = load_lanes(values + c * LANES);
#pragma GCC unroll 4
                for (int g = 0; g < heads; g++) sums[g][c] += weights[g * stride + t] * value;
            }
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) store_lanes(out + g * D + d + c * LANES, sums[g][c]);
}

INLINE void weigh_heads(const float *weights, const Part *parts, long count, const ELEMENT *next, ELEMENT *out,
                        long stride, long D, int heads) {
    long d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) weigh(weights, parts, count, next, out, stride, D, d, heads, 4);
    for (; d < D; d += LANES) weigh(weights, parts, count, next, out, stride, D, d, heads, 1);
}

/* Writes the key and value of a row's new token to its slot, for one key-value head, and computes that token's attention. */
INLINE void attend_head(const ELEMENT *qkv, ELEMENT *cache, const int64_t *positions, const Spans *shared, ELEMENT *out,
                        float *query, float scale, long layer, long pair, long last, long H, long K, long D, long T,
                        long values_at) {
    long row = pair / K, head = pair % K, position = positions[row], G = H / K, stride = shared->tokens + T + 8;
    const ELEMENT *token = qkv + row * (H + 2 * K) * D;
    ELEMENT *keys = cache + pair * T * D, *values = keys + values_at;
    for (long d = 0; d < D; d += 8) {
        store(keys + position * D + d, load(token + (H + head) * D + d));
        store(values + position * D + d, load(token + (H + K + head) * D + d));
    }
    const Span *spans = shared->spans + (shared->first ? shared->first[row] : 0);
    long before = shared->first ? shared->first[row + 1] - shared->first[row] : 0, tokens = 0;
    Part parts[before + 1];
    for (long i = 0; i < before; i++) {
        const ELEMENT *from = spans[i].keys + (2 * K * layer + head) * spans[i].head;
        parts[i] = (Part){from, from + K * spans[i].head, spans[i].tokens};
    }
    parts[before] = (Part){keys, values, position + 1};
    float *scores = query + G * D;
    for (long d = 0; d < G * D; d += 8) *(Float8 *)(query + d) = load(token + head * G * D + d) * all8(scale);
    for (long i = 0; i <= before; tokens += parts[i++].tokens) {
        const Part *part = parts + i;
        if (D == 64) scores_of(query, part->keys, part->values, scores + tokens, G, part->tokens, stride, 64);
        else if (D == 128) scores_of(query, part->keys, part->values, scores + tokens, G, part->tokens, stride, 128);
        else scores_of(query, part->keys, part->values, scores + tokens, G, part->tokens, stride, D);
    }
    for (long g = 0; g < G; g++) {
        for (long t = tokens; t % 8; t++) scores[g * stride + t] = LOWEST;
        soften(scores + g * stride, (tokens + 7) / 8 * 8);
    }
    for (long g = 0; g < G;) {
        const float *weights = scores + g * stride;
        const ELEMENT *next = g == 0 && pair < last ? keys + T * D : 0; /* the keys of the next pair */
        ELEMENT *to = out + (row * H + head * G + g) * D;
        long heads = G - g < HEADS ? G - g : HEADS;
        switch (heads) {
        case 1: weigh_heads(weights, parts, before + 1, next, to, stride, D, 1); break;
        case 2: weigh_heads(weights, parts, before + 1, next, to, stride, D, 2); break;
        case 3: weigh_heads(weights, parts, before + 1, next, to, stride, D, 3); break;
        case 4: weigh_heads(weights, parts, before + 1, next, to, stride, D, 4); break;
        }
        g += heads;
    }
}

/* Attention of one layer. qkv is [N, H + 2K, D] and out [N, H, D]. `cache` holds the keys [N, K, T, D], and the values at offset
   `values_at`. `scratch` has H / K * (D + shared->tokens + T + 8) numbers per thread. */
void attend(const ELEMENT *qkv, ELEMENT *cache, const int64_t *positions, const Spans *shared, ELEMENT *out,
            float *scratch, float scale, long layer, long N, long H, long K, long D, long T, long values_at,
            long threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long thread = 0; thread < threads; thread++) {
        float *query = scratch + thread * (H / K) * (D + shared->tokens + T + 8);
        long end = N * K * (thread + 1) / threads;
        for (long pair = N * K * thread / threads; pair < end; pair++)
            attend_head(qkv, cache, positions, shared, out, query, scale, layer, pair, end - 1, H, K, D, T, values_at);
    }
}
