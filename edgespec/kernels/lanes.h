/* Vectors of 16 floats, those of GCC and clang, which any CPU's instructions are made of. */

#ifndef EDGESPEC_LANES_H
#define EDGESPEC_LANES_H

#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
#define LOAD(place) (*(const Lanes *)(place))
#define EVERY(x) ((x) - (Lanes){0})

static inline float lanes_sum(Lanes x)
{
    float lane[LANES];
    memcpy(lane, &x, sizeof lane);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lane[i] += lane[i + step];
    return lane[0];
}

/* e^x for x <= 0, within a few units in the last place; 0 below -87. 2^n times a polynomial (Taylor on +- ln 2 / 2). */
static inline Lanes exponential(Lanes x)
{
    const Lanes magic = EVERY(12582912.0f); /* 1.5 * 2^23: what is added to it is rounded to whole numbers */
    const Ints is_low = x < EVERY(-87.0f);
    const Lanes shifted = x * EVERY(1.44269504f) + magic, whole = shifted - magic;
    Lanes r = x - whole * EVERY(0.693145752f);
    r = r - whole * EVERY(1.42860677e-6f);
    Lanes p = EVERY(1.0f / 720);
    p = p * r + EVERY(1.0f / 120);
    p = p * r + EVERY(1.0f / 24);
    p = p * r + EVERY(1.0f / 6);
    p = p * r + EVERY(0.5f);
    p = p * r + EVERY(1.0f);
    p = p * r + EVERY(1.0f);
    const Ints power = ((Ints)shifted << 23) + ((127 << 23) - (Ints){0});
    return (Lanes)((Ints)(p * (Lanes)power) & ~is_low);
}

#endif
