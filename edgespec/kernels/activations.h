/* What is done to a row of activations before a product with it: norm or gate, and rounding to 8 bits. */

#ifndef EDGESPEC_ACTIVATIONS_H
#define EDGESPEC_ACTIVATIONS_H

#include "lanes.h"
#include "operators.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(PORTABLE)
#include <immintrin.h>
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

/* n floats to codes of -127 .. 127, their scale, and scale times the sum of the codes; NaN where an input is. */
static inline void round_block(const float *x, int64_t n, int8_t *codes, float *scale, float *sum)
{
    float most = 0;
    int is_broken = 0;
    int32_t total = 0;
#if HAS_VNNI
    __m512 top = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 here = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512 v = _mm512_maskz_loadu_ps(here, x + i);
        bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        top = _mm512_max_ps(top, _mm512_abs_ps(v));
    }
    most = _mm512_reduce_max_ps(top);
    is_broken = bad != 0;
#else
    for (int64_t i = 0; i < n; i++) {
        float v = fabsf(x[i]);
        is_broken |= v != v;
        most = v > most ? v : most;
    }
#endif
    float factor = most > 0 ? 127.0f / most : 0.0f;
#if HAS_VNNI
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 here = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, x + i), _mm512_set1_ps(factor)));
        sums = _mm512_add_epi32(sums, q);
        _mm512_mask_cvtepi32_storeu_epi8(codes + i, here, q);
    }
    total = _mm512_reduce_add_epi32(sums);
#else
    for (int64_t i = 0; i < n; i++) {
        int32_t q = (int32_t)nearbyintf(x[i] * factor);
        codes[i] = (int8_t)q;
        total += q;
    }
#endif
    *scale = is_broken ? NAN : most / 127.0f;
    *sum = *scale * (float)total;
}

/* ---- k is a multiple of LANES from here on ---- */

static inline void gate(const float *gate, int64_t k, float *out)
{
    for (int64_t i = 0; i < k; i += LANES) {
        const Lanes x = LOAD(gate + i);
        const Ints is_negative = x < EVERY(0.0f), bits = (Ints)x & INT32_MAX;
        const Lanes e = exponential(-(Lanes)bits), down = EVERY(1.0f) / (EVERY(1.0f) + e), low = e * down;
        const Lanes sigmoid = (Lanes)(((Ints)low & is_negative) | ((Ints)down & ~is_negative));
        *(Lanes *)(out + i) = x * sigmoid * LOAD(gate + k + i);
    }
}

static inline void normalize(const float *x, const float *skip, const float *gamma, float epsilon, int64_t k, float *sum, float *out)
{
    Lanes squares = {0};
    for (int64_t i = 0; i < k; i += LANES) {
        Lanes v = LOAD(x + i);
        if (skip) {
            v = v + LOAD(skip + i);
            *(Lanes *)(sum + i) = v;
        }
        *(Lanes *)(out + i) = v;
        squares += v * v;
    }
    const float factor = 1.0f / sqrtf(lanes_sum(squares) / (float)k + epsilon);
    for (int64_t i = 0; i < k; i += LANES) *(Lanes *)(out + i) = LOAD(out + i) * EVERY(factor) * LOAD(gamma + i);
}

#endif
