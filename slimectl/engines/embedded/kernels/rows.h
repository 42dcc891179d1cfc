/* Norms, rotary embeddings and gates of rows.

   N rows, E hidden size, I inner size, D head dimension, R rotated dimensions of a head. E and I are multiples of 8, D and R of 16. */

#pragma once
#include "numbers.h"

INLINE void normalize(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, long E, float eps, float offset) {
    Float8 squares[4] = {{0}};
    long e = 0;
    for (; e + 32 <= E; e += 32)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) squares[i] += load(x + e + 8 * i) * load(x + e + 8 * i);
    for (; e < E; e += 8) squares[0] += load(x + e) * load(x + e);
    float sum = sum8((squares[0] + squares[1]) + (squares[2] + squares[3]));
    Float8 scale = all8(1 / __builtin_sqrtf(sum / E + eps));
    for (long e = 0; e < E; e += 8) store(out + e, load(x + e) * scale * (load(weight + e) + all8(offset)));
}

/* out [N, E] = x / rms(x) * (weight + offset) */
void rms_norm(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, long N, long E, float eps, float offset) {
    for (long row = 0; row < N; row++) normalize(x + row * E, weight, out + row * E, E, eps, offset);
}

/* The same, in place, for the first `normed` of `heads` heads of every row. weight is [normed, D]. */
void norm_heads(ELEMENT *x, const ELEMENT *weight, long N, long normed, long heads, long D, float eps, float offset) {
    for (long row = 0; row < N; row++)
        for (long head = 0; head < normed; head++) {
            ELEMENT *at = x + (row * heads + head) * D;
            normalize(at, weight + head * D, at, D, eps, offset);
        }
}

/* Rotates the first R dimensions of the first `rotated` of `heads` heads of every row. The first half of the sines is negated. */
void rotate(ELEMENT *x, const ELEMENT *cosines, const ELEMENT *sines, long N, long rotated, long heads, long D,
            long R) {
    long half = R / 2;
    for (long row = 0; row < N; row++, cosines += R, sines += R) {
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
