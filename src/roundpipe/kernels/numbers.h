// Arrays of several dtypes, a block of which is worked on in fp32. The loops are vectorised by the
// compiler.

#ifndef ROUNDPIPE_NUMBERS_H
#define ROUNDPIPE_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if !defined(__FLT16_MANT_DIG__)
#error "this compiler has no _Float16"
#endif

enum { BLOCK = 512 };
enum dtype { NONE, FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8 };

typedef struct {
    void *address;
    int64_t dtype;
} array;

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = to_bits(value);
    // To nearest, ties to even.
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return value != value ? 0x7fc0 : rounded;
}

static void read_float16(float *restrict to, const uint16_t *restrict from, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++) {
        _Float16 value;
        memcpy(&value, from + i, 2);
        to[i] = (float)value;
    }
}

static void write_float16(uint16_t *restrict to, const float *restrict from, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < n; i++) {
        _Float16 value = (_Float16)from[i];
        memcpy(to + i, &value, 2);
    }
}

static void read_bfloat16(float *restrict to, const uint16_t *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from_bits((uint32_t)from[i] << 16);
}

static void read(float *restrict to, array from, int64_t at, int64_t n) {
    if (from.dtype == FLOAT32)
        memcpy(to, (const float *)from.address + at, n * 4);
    else if (from.dtype == BFLOAT16)
        read_bfloat16(to, (const uint16_t *)from.address + at, n);
    else
        read_float16(to, (const uint16_t *)from.address + at, n);
}

static void write_16_bits(
    uint16_t *restrict to, const float *restrict from, int64_t dtype, int64_t n) {
    if (dtype == BFLOAT16)
        for (int64_t i = 0; i < n; i++) to[i] = to_bfloat16(from[i]);
    else
        write_float16(to, from, n);
}

// Past the cache where that can be, because nobody here reads it.
static void store(uint16_t *restrict to, const uint16_t *restrict from, int64_t n) {
    int64_t i = 0;
#if defined(__AVX2__)
    if ((uintptr_t)to % sizeof(__m256i) == 0 && n % 16 == 0)
        for (; i < n; i += 16)
            _mm256_stream_si256(
                (__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
#endif
    if (i < n) memcpy(to, from, n * 2);
}

static void write(array to, const float *restrict from, int64_t at, int64_t n) {
    _Alignas(64) uint16_t rounded[BLOCK];
    if (to.dtype == FLOAT32) {
        memcpy((float *)to.address + at, from, n * 4);
    } else {
        write_16_bits(rounded, from, to.dtype, n);
        store((uint16_t *)to.address + at, rounded, n);
    }
}

#endif
