// AdamW on state in fewer bits than fp32: the kernel beside optim/lean.py and optim/moments.py,
// which say what is stored and why it is rounded at random.
//
// What is stored becomes fp32 in a block that stays in the first-level cache, and is rounded from
// there. Results are those of the torch code to the bit, on any machine: operations and their order
// are the same, nothing is contracted, and of a block's values only the largest is taken, which has
// no order. Random numbers come from the element's place in its parameter, so threads and blocks
// change none.

#ifndef ROUNDPIPE_LEAN_H
#define ROUNDPIPE_LEAN_H

#include <stdbool.h>

#include "numbers.h"

enum { SCALED = 256 };  // values that share a scale
_Static_assert(BLOCK % SCALED == 0, "a block has whole ones, but for the last");

typedef struct {
    float beta1, share1, beta2, share2, correction, eps, step;
} lean_adam;

// 32 random bits for each element: a hash of its place and two keys. Counters are `STRIDE` apart.

static const uint32_t STRIDE = 0x9e3779b9u;

static inline uint32_t counter_at(const uint32_t *key, int64_t at) {
    return key[0] + (uint32_t)at * STRIDE;
}

static inline uint32_t random_bits(uint32_t counter, uint32_t key) {
    uint32_t x = (counter ^ (counter >> 16)) * 0x7feb352du ^ key;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// bf16: a random number is added to the half that is cut off. Infs stay, and so do NaNs, of which
// the sum might make a number.

static inline uint16_t rounded(float value, uint32_t half) {
    uint16_t upper = (uint16_t)((to_bits(value) + half) >> 16);
    return value != value ? 0x7fc0 : upper;
}

static void round_one(
    uint16_t *restrict to, const float *restrict from, const uint32_t *key, int64_t at,
    int64_t n) {
    uint32_t counter = counter_at(key, at);
    for (int64_t i = 0; i < n; i++, counter += STRIDE)
        to[i] = rounded(from[i], random_bits(counter, key[1]) & 0xffff);
}

static void round_two(
    uint16_t *restrict to, uint16_t *restrict second_to, const float *restrict from,
    const float *restrict second_from, const uint32_t *key, int64_t at, int64_t n) {
    uint32_t counter = counter_at(key, at);
    for (int64_t i = 0; i < n; i++, counter += STRIDE) {
        uint32_t bits = random_bits(counter, key[1]);
        to[i] = rounded(from[i], bits & 0xffff);
        second_to[i] = rounded(second_from[i], bits >> 16);
    }
}

// 8 bits. A mean is its code's square times a unit, with the code's sign; a mean square is its
// code's fourth power times a unit.

#define MEAN_UNITS (127.0f * 127.0f)  // a scale has
#define SQUARE_UNITS (255.0f * 255.0f * 255.0f * 255.0f)

static void read_means(float *restrict to, const int8_t *restrict codes, float scale, int64_t n) {
    const float unit = scale * (float)(1.0 / (127.0 * 127.0));
    int64_t i = 0;
#if defined(__AVX2__)  // because compilers widen bytes in more steps than that
    const __m256 units = _mm256_set1_ps(unit), sign = _mm256_set1_ps(-0.0f);
    for (; i + 8 <= n; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i));
        __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        __m256 square = _mm256_mul_ps(code, _mm256_andnot_ps(sign, code));
        _mm256_storeu_ps(to + i, _mm256_mul_ps(square, units));
    }
#endif
    for (; i < n; i++) to[i] = (float)codes[i] * fabsf((float)codes[i]) * unit;
}

static void read_squares(
    float *restrict to, const uint8_t *restrict codes, float scale, int64_t n) {
    const float unit = scale * (float)(1.0 / (255.0 * 255.0 * 255.0 * 255.0));
    int64_t i = 0;
#if defined(__AVX2__)
    const __m256 units = _mm256_set1_ps(unit);
    for (; i + 8 <= n; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i));
        __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
        __m256 square = _mm256_mul_ps(code, code);
        _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_mul_ps(square, square), units));
    }
#endif
    for (; i < n; i++) {
        float square = (float)codes[i] * (float)codes[i];
        to[i] = square * square * unit;
    }
}

static void narrow(uint8_t *restrict codes, const int32_t *restrict wide, int64_t n) {
    int64_t i = 0;
#if defined(__AVX2__)
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i byte = _mm256_set1_epi32(0xff);
    for (; i + 32 <= n; i += 32) {
        __m256i part[4];
        for (int64_t k = 0; k < 4; k++)
            part[k] = _mm256_and_si256(
                _mm256_loadu_si256((const __m256i *)(wide + i + 8 * k)), byte);
        __m256i low = _mm256_packus_epi32(part[0], part[1]);
        __m256i high = _mm256_packus_epi32(part[2], part[3]);
        __m256i packed = _mm256_packus_epi16(low, high);
        _mm256_storeu_si256(
            (__m256i *)(codes + i), _mm256_permutevar8x32_epi32(packed, order));
    }
#endif
    for (; i < n; i++) codes[i] = (uint8_t)wide[i];
}

// How many units a scale is. None for a block of zeros, or of values whose inverse is not finite.
static inline float units_in(float scale, float units) {
    float per_value = 1.0f / scale * units;
    return per_value == INFINITY ? 0.0f : per_value;
}

// Of a NaN any code may come: its scale is not finite either.
static inline int32_t code_below(float root, int32_t least, int32_t most) {
    int32_t code = (int32_t)root;
    code = code > least ? code : least;
    return code < most ? code : most;
}

// One scale's values. `scales`: the largest mean and mean square; `roots`: of the mean squares, are
// overwritten. In loops where the roots that the next one needs are computed beside what has none,
// because nothing takes as long as they do.
static void write_codes(
    int8_t *restrict mean_codes, uint8_t *restrict square_codes, const float *restrict m,
    const float *restrict v, float *restrict roots, const float *scales, const uint32_t *key,
    int64_t at, int64_t n) {
    _Alignas(64) float mean_roots[SCALED];
    _Alignas(64) uint32_t bits[SCALED];
    _Alignas(64) int32_t wide[SCALED];
    const float mean_units = units_in(scales[0], MEAN_UNITS);
    const float square_units = units_in(scales[1], SQUARE_UNITS), root = sqrtf(square_units);
    uint32_t counter = counter_at(key, at);
    for (int64_t i = 0; i < n; i++, counter += STRIDE) {
        bits[i] = random_bits(counter, key[1]);
        mean_roots[i] = sqrtf(fabsf(m[i]) * mean_units);
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t code = code_below(mean_roots[i], 0, 126);
        float lower = (float)code, step = lower * (2.0f / 65536) + 1.0f / 65536;
        float chance = (float)(int32_t)(bits[i] & 0xffff);
        code += step * chance < fabsf(m[i]) * mean_units - lower * lower ? 1 : 0;
        wide[i] = m[i] < 0 ? -code : code;
        roots[i] = sqrtf(roots[i] * root);
    }
    narrow((uint8_t *)mean_codes, wide, n);
    for (int64_t i = 0; i < n; i++) {
        int32_t code = code_below(roots[i], 1, 254);
        float below = (float)code, above = below + 1.0f;
        below *= below;
        below *= below;
        above *= above;
        above *= above;
        float chance = (float)(int32_t)(bits[i] >> 16) * (1.0f / 65536);
        wide[i] = code + ((above - below) * chance < v[i] * square_units - below ? 1 : 0);
    }
    narrow(square_codes, wide, n);
}

// `largest`: of the means and of the mean squares. As integers, because a NaN then is the largest
// of all and compilers may take them in any order.
static void update_scaled(
    const lean_adam *a, float decay, const float *restrict g, float *restrict x,
    float *restrict m, float *restrict v, float *restrict roots, float *restrict largest,
    int64_t n) {
    const float beta1 = a->beta1, share1 = a->share1, beta2 = a->beta2, share2 = a->share2;
    const float correction = a->correction, eps = a->eps, step = a->step;
    int32_t largest_mean = 0, largest_square = 0;
    for (int64_t i = 0; i < n; i++) {
        float mean = m[i] * beta1 + g[i] * share1;
        float square = v[i] * beta2 + g[i] * share2 * g[i], root = sqrtf(square);
        int32_t size = (int32_t)(to_bits(mean) & 0x7fffffff);
        largest_mean = size > largest_mean ? size : largest_mean;
        size = (int32_t)(to_bits(square) & 0x7fffffff);
        largest_square = size > largest_square ? size : largest_square;
        m[i] = mean;
        v[i] = square;
        roots[i] = root;
        x[i] = x[i] * decay + mean * step / (root * correction + eps);
    }
    largest[0] = from_bits((uint32_t)largest_mean);
    largest[1] = from_bits((uint32_t)largest_square);
}

// `written`: weight, first moment and its scales, second moment and its scales. `keys`: two for the
// moments, two for the weight.
static void update_lean(
    const lean_adam *a, float decay, const uint32_t *keys, const array *written,
    const float *restrict g, int64_t at, int64_t n) {
    _Alignas(64) float own_x[BLOCK], own_m[BLOCK], own_v[BLOCK], roots[BLOCK];
    float largest[BLOCK / SCALED][2];
    const bool has_codes = written[1].dtype == INT8, has_bf16 = written[1].dtype == BFLOAT16;
    const bool is_wide = written[0].dtype == FLOAT32, is_exact = written[1].dtype == FLOAT32;
    const array mean = written[1], square = written[has_codes ? 3 : 2];
    uint16_t *x16 = (uint16_t *)written[0].address + at;
    uint16_t *m16 = (uint16_t *)mean.address + at, *v16 = (uint16_t *)square.address + at;
    float *x = is_wide ? (float *)written[0].address + at : own_x;
    float *m = is_exact ? (float *)mean.address + at : own_m;
    float *v = is_exact ? (float *)square.address + at : own_v;
    if (!is_wide) read_bfloat16(x, x16, n);
    if (has_bf16) {
        read_bfloat16(m, m16, n);
        read_bfloat16(v, v16, n);
    }
    for (int64_t i = 0; i < n; i += SCALED) {
        int64_t size = n - i < SCALED ? n - i : SCALED, place = (at + i) / SCALED;
        if (has_codes) {
            float *scales = written[2].address, *square_scales = written[4].address;
            read_means(m + i, (int8_t *)mean.address + at + i, scales[place], size);
            read_squares(v + i, (uint8_t *)square.address + at + i, square_scales[place], size);
        }
        update_scaled(a, decay, g + i, x + i, m + i, v + i, roots + i, largest[i / SCALED], size);
    }
    for (int64_t i = 0; has_codes && i < n; i += SCALED) {
        int64_t size = n - i < SCALED ? n - i : SCALED, place = (at + i) / SCALED;
        const float *scales = largest[i / SCALED];
        ((float *)written[2].address)[place] = scales[0];
        ((float *)written[4].address)[place] = scales[1];
        write_codes(
            (int8_t *)mean.address + at + i, (uint8_t *)square.address + at + i, m + i, v + i,
            roots + i, scales, keys, at + i, size);
    }
    if (has_bf16) round_two(m16, v16, m, v, keys, at, n);
    if (!is_wide) round_one(x16, x, keys + 2, at, n);
}

#endif
