// Half codes of sixteen rows, two columns of each side by side, times activations in bf16 by AVX-512 BF16 (vdpbf16ps).
//
// A half code becomes bf16 by one permutation of a table of 16 values, which is exact. Included behind PLANE and the
// instructions' pragma, where an order of weights is known.
#pragma once
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MOST_TOKENS 8
// Bytes that are asked for ahead of a product: without it a step of one token takes 1.4 times as long.
#define AHEAD 6144

// `factor` times each of 16 values, twice: the permutation reads five bits of an index.
INLINE __m512i table_of(const short *values, int factor) {
    uint16_t words[32];
    for (int at = 0; at < 32; at++) {
        float value = (float)(values[at % 16] * factor);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        words[at] = (uint16_t)(bits >> 16);
    }
    return _mm512_loadu_si512(words);
}

// Columns [8 · first, 8 · last) of 32: two sums a token, in turn, for the instruction's latency is longer than one hides.
INLINE void codes_product(const uint8_t *codes, __m512i low, __m512i high, const uint16_t *x, long columns,
                          __m512 (*sums)[2], int planes, int first, int last, int tokens) {
#pragma GCC unroll 4
    for (int part = first; part < last; part++) {
#pragma GCC unroll 4
        for (int nibble = 0; nibble < 4; nibble++) {
            __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(codes + 64 * part), 4 * nibble), above = words;
            if (planes == 2) above = _mm512_srli_epi16(_mm512_loadu_si512(codes + PLANE + 64 * part), 4 * nibble);
            __m512i code = _mm512_permutexvar_epi16(words, low), upper = _mm512_permutexvar_epi16(above, high);
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++) {
                int32_t pair;
                memcpy(&pair, x + m * columns + 8 * part + 2 * nibble, 4);
                __m512bh values = (__m512bh)_mm512_set1_epi32(pair);
                __m512 sum = _mm512_dpbf16_ps(sums[m][nibble % 2], (__m512bh)code, values);
                sums[m][nibble % 2] = planes == 2 ? _mm512_dpbf16_ps(sum, (__m512bh)upper, values) : sum;
            }
        }
    }
}
