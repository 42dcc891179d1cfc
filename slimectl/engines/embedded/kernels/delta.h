/* A gated delta net, token by token (Yang et al. 2024, arXiv:2412.06464).

   B sequences, N rows of new tokens, G key heads, H value heads, K key width and V value width (multiples of 16), S taps of the convolution, and
   W = 2 G K + H V channels. */

#pragma once
#include "numbers.h"

typedef struct {
    long B, G, H, K, V, S, threads;
} DeltaSizes;

/* Weights: the convolution's kernel [S, W] in float32, logarithm and bias of the decay [H], and the norm [V]. */
typedef struct {
    const float *kernel;
    const ELEMENT *decay_log, *decay_bias, *norm;
} DeltaWeights;

INLINE float exp1(float x) { return exp8(all8(x))[0]; }

/* log(1 + e^x), by the series of artanh. */
INLINE float softplus(float x) {
    float rest = exp1(x < 0 ? x : -x), t = rest / (2 + rest), square = t * t, sum = 0;
    for (int i = 15; i > 0; i -= 2) sum = sum * square + 1.0f / i;
    return (x < 0 ? 0 : x) + 2 * t * sum;
}

/* Convolves `count` channels from `first` on with the earlier inputs [S - 1, W], which then end with the new ones. */
INLINE void convolve(const ELEMENT *now, ELEMENT *earlier, const float *kernel, float *out, long first, long count, long S,
                     long W) {
    for (long c = first; c < first + count; c += 8) {
        Float8 input = load(now + c), sum = input * *(Float8 *)(kernel + (S - 1) * W + c);
        for (long s = 0; s < S - 1; s++) {
            sum += load(earlier + s * W + c) * *(Float8 *)(kernel + s * W + c);
            store(earlier + s * W + c, s + 1 < S - 1 ? load(earlier + (s + 1) * W + c) : input);
        }
        *(Float8 *)(out + c - first) = silu8(sum);
    }
}

INLINE float product_of(const float *a, const float *b, long count) {
    Float8 sum = {0};
    for (long i = 0; i < count; i += 8) sum += *(Float8 *)(a + i) * *(Float8 *)(b + i);
    return sum8(sum);
}

INLINE void scale_to_norm(float *x, float norm, long count) {
    Float8 scale = all8(norm / __builtin_sqrtf(product_of(x, x, count) + 1e-6f));
    for (long i = 0; i < count; i += 8) *(Float8 *)(x + i) *= scale;
}

/* Updates `vectors` registers of columns of a memory [K, V] and reads them: memory = decay memory + key delta,
   out = query memory, where delta = beta (value - decay key memory). */
INLINE void remember(float *memory, const float *query, const float *key, const float *value, float *out, float overlap,
                     float decay, float beta, long K, long V, int vectors) {
    Floats by_key[4] = {{0}}, by_query[4] = {{0}};
    for (long i = 0; i < K; i++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            Floats cell = *(Floats *)(memory + i * V + c * LANES);
            by_key[c] += cell * key[i];
            by_query[c] += cell * query[i];
        }
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) {
        by_key[c] = (*(const Floats *)(value + c * LANES) - by_key[c] * decay) * beta;
        *(Floats *)(out + c * LANES) = by_query[c] * decay + by_key[c] * overlap;
    }
    for (long i = 0; i < K; i++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            Floats *cell = (Floats *)(memory + i * V + c * LANES);
            *cell = *cell * decay + by_key[c] * key[i];
        }
}

/* Computes the value heads of a key head for a row, which is a token of the sequence with these inputs and memories. */
INLINE void delta_heads(const ELEMENT *projected, ELEMENT *earlier, float *memory, const DeltaWeights *weights,
                        const DeltaSizes *size, ELEMENT *out, long row, long group, float eps) {
    long G = size->G, H = size->H, K = size->K, V = size->V, S = size->S, W = 2 * G * K + H * V, share = H / G;
    float query[K], key[K], value[V], read[V];
    const ELEMENT *now = projected + row * (W + H * V + 2 * H), *betas = now + W + H * V, *alphas = betas + H;
    convolve(now, earlier, weights->kernel, query, group * K, K, S, W);
    convolve(now, earlier, weights->kernel, key, (G + group) * K, K, S, W);
    scale_to_norm(query, 1 / __builtin_sqrtf(K), K);
    scale_to_norm(key, 1, K);
    float overlap = product_of(query, key, K);
    for (long head = group * share; head < (group + 1) * share; head++) {
        convolve(now, earlier, weights->kernel, value, 2 * G * K + head * V, V, S, W);
        float rate = exp1(number(weights->decay_log + head));
        float decay = exp1(-rate * softplus(number(alphas + head) + number(weights->decay_bias + head)));
        float beta = 1 / (1 + exp1(-number(betas + head)));
        float *cells = memory + head * K * V;
        long v = 0;
        for (; v + 4 * LANES <= V; v += 4 * LANES)
            remember(cells + v, query, key, value + v, read + v, overlap, decay, beta, K, V, 4);
        for (; v < V; v += LANES) remember(cells + v, query, key, value + v, read + v, overlap, decay, beta, K, V, 1);
        Float8 scale = all8(1 / __builtin_sqrtf(product_of(read, read, V) / V + eps));
        const ELEMENT *gates = now + W + head * V;
        for (v = 0; v < V; v += 8)
            store(out + (row * H + head) * V + v,
                  *(Float8 *)(read + v) * scale * load(weights->norm + v) * silu8(load(gates + v)));
    }
}

/* out [N, H V]: the normalized and gated outputs. A row of `projected` has query [G K], key [G K], value [H V], gates [H V],
   beta [H] and alpha [H]. Rows first[b] to first[b + 1] are the new tokens of sequence b. Updates the inputs of the
   convolution [B, S - 1, W] and the memories [B, H, K, V]. */
void delta_net(const ELEMENT *projected, const int64_t *first, ELEMENT *earlier, float *memory, const DeltaWeights *weights,
               const DeltaSizes *size, ELEMENT *out, float eps) {
    long threads = size->threads, G = size->G, H = size->H, K = size->K, V = size->V, pairs = size->B * G;
    long inputs = (size->S - 1) * (2 * G * K + H * V), cells = H * K * V;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long thread = 0; thread < threads; thread++)
        for (long pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; pair++) {
            long b = pair / G;
            for (long row = first[b]; row < first[b + 1]; row++)
                delta_heads(projected, earlier + b * inputs, memory + b * cells, weights, size, out, row, pair % G, eps);
        }
}
