/* The decoding step of the embedded engine on CPUs. ../native.py compiles and calls it.

   Every row is computed by the same operations in the same order, whatever other rows are in the batch. */

#include "attention.h"
#include "delta.h"
#include "products.h"
#include "rows.h"

/* The addresses of a dense block's weights: panels, biases in panel order (0: none), and norms (qk_norm 0: none). */
typedef struct {
    const ELEMENT *input_norm, *qkv, *qkv_bias, *qk_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
} Block;

/* N rows, E hidden size, H query heads, K key-value heads, D head dimension, F inner size, T token capacity of a slot.
   In the cache, the values of a block start `values_at` numbers after its keys, and the next block starts at `next_at`. */
typedef struct {
    long blocks, N, E, H, K, D, F, T, values_at, next_at, threads;
} Sizes;

/* Runs the blocks on the residual stream [N, E] in place. `cache` is [blocks, 2, slots, K, T, D]. `scratch` is used by `attend`
   and for inputs of products. `rows` has N * (E + (2 H + 2 K) D + F) numbers. */
void decode(const Block *block, const Sizes *size, ELEMENT *stream, ELEMENT *cache, const int64_t *positions,
            const Spans *shared, const ELEMENT *cosines, const ELEMENT *sines, ELEMENT *rows, float *scratch, float eps) {
    long N = size->N, E = size->E, H = size->H, K = size->K, D = size->D, F = size->F, threads = size->threads;
    long heads = H + 2 * K, rotated = H + K;
    ELEMENT *normed = rows, *qkv = normed + N * E, *attended = qkv + N * heads * D, *inner = attended + N * H * D;
    float scale = 1 / __builtin_sqrtf(D);
    for (long i = 0; i < size->blocks; i++, block++, cache += size->next_at) {
        rms_norm(stream, block->input_norm, normed, N, E, eps, 0);
        product(inputs_of(normed, scratch, N * E), block->qkv, block->qkv_bias, 0, qkv, N, E, heads * D, 0, threads);
        if (block->qk_norm) norm_heads(qkv, block->qk_norm, N, rotated, heads, D, eps, 0);
        rotate(qkv, cosines, sines, N, rotated, heads, D, D);
        attend(qkv, cache, positions, shared, attended, scratch, scale, i, N, H, K, D, size->T, size->values_at, threads);
        product(inputs_of(attended, scratch, N * H * D), block->o, block->o_bias, stream, stream, N, H * D, E, 0, threads);
        rms_norm(stream, block->post_norm, normed, N, E, eps, 0);
        product(inputs_of(normed, scratch, N * E), block->gate_up, block->gate_up_bias, 0, inner, N, E, 2 * F, 1, threads);
        product(inputs_of(inner, scratch, N * F), block->down, block->down_bias, stream, stream, N, F, E, 0, threads);
    }
}
