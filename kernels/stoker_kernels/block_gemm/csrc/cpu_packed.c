// Weights in blocks of 32 columns of GGUF, multiplied with activations in bf16 by AVX-512 BF16 (vdpbf16ps).
//
// They lie as cpu_packed_order.h says, packed by cpu_packed_floats.c. Half codes become bf16 by one permutation of a table
// of 16 values, which is exact: codes have at most 4 bits.
//
// Shapes: weight [rows, row_bytes], x [tokens, columns] bf16, y [tokens, stride] bf16 or fp32.
// Invariants: a product is exact, sums are fp32, scales and offsets are applied to the sums of a block, and the result is
// rounded once; each row of y depends on its own row of x alone, whatever the number of tokens and threads.
#if !defined(__x86_64__)
#error "needs x86-64"
#endif
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#include <immintrin.h>
#include <string.h>

#include "cpu_packed_order.h"
#include "cpu_pool.h"

#define MOST_TOKENS 8
// Bytes that are asked for ahead of a product: without it a step of one token takes 1.4 times as long.
#define AHEAD 6144
#define INLINE static inline __attribute__((always_inline))

INLINE __m512i table_of(const short *values) {
    uint16_t words[32];
    for (int at = 0; at < 32; at++) {
        float value = (float)values[at % 16];
        uint32_t bits;
        memcpy(&bits, &value, 4);
        words[at] = (uint16_t)(bits >> 16);
    }
    return _mm512_loadu_si512(words);
}

// The codes of a block: two sums a token, in turn, for the instruction's latency is longer than one can hide.
INLINE void codes_product(const uint8_t *codes, __m512i low, __m512i high, const uint16_t *x, long columns,
                          __m512 (*sums)[2], int planes, int tokens) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
#pragma GCC unroll 4
        for (int nibble = 0; nibble < 4; nibble++) {
            __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(codes + 64 * part), 4 * nibble), above = words;
            if (planes == 2) above = _mm512_srli_epi16(_mm512_loadu_si512(codes + PLANE + 64 * part), 4 * nibble);
            // The permutation reads five bits of an index; both halves of the table are the same.
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

INLINE __m512 scales_at(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

// Sixteen rows against `tokens` rows of x; planes, offset and tokens are constants where it is called.
INLINE void group_product(const struct Work *w, int kind, const uint8_t *block, long token, long row, int planes,
                          int offset, int tokens) {
    long blocks = w->columns / COLUMNS, bytes = planes * PLANE + (1 + offset) * 2 * GROUP;
    const uint16_t *x = (const uint16_t *)w->x + token * w->columns;
    const float *sums = w->sums + token * blocks;
    __m512i low = table_of(KINDS[kind].low), high = table_of(KINDS[kind].high);
    __m512 totals[MOST_TOKENS];
#pragma GCC unroll 8
    for (int m = 0; m < tokens; m++) totals[m] = w->bias ? _mm512_loadu_ps(w->bias + row) : _mm512_setzero_ps();
    for (long at = 0; at < blocks; at++, block += bytes, x += COLUMNS) {
        for (long line = 0; line < bytes; line += 64)
            _mm_prefetch((const char *)block + AHEAD + line, _MM_HINT_T0);
        __m512 dots[MOST_TOKENS][2];
#pragma GCC unroll 8
        for (int m = 0; m < tokens; m++) dots[m][0] = dots[m][1] = _mm512_setzero_ps();
        codes_product(block, low, high, x, w->columns, dots, planes, tokens);
        __m512 scale = scales_at(block + planes * PLANE);
#pragma GCC unroll 8
        for (int m = 0; m < tokens; m++)
            totals[m] = _mm512_fmadd_ps(scale, _mm512_add_ps(dots[m][0], dots[m][1]), totals[m]);
        if (offset) {
            __m512 lows = scales_at(block + planes * PLANE + 2 * GROUP);
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++)
                totals[m] = _mm512_fmadd_ps(lows, _mm512_set1_ps(sums[m * blocks + at]), totals[m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < tokens; m++) {
        long place = (token + m) * w->stride + row;
        if (w->wide) _mm512_storeu_ps((float *)w->y + place, totals[m]);
        else _mm256_storeu_si256((__m256i *)((uint16_t *)w->y + place), (__m256i)_mm512_cvtneps_pbh(totals[m]));
    }
}

#define FOR_TOKENS(count) \
    case count: group_product(w, kind, block, token, row, planes, offset, count); break;

INLINE void group_by_tokens(const struct Work *w, int kind, const uint8_t *block, long row, int planes, int offset) {
    for (long token = 0; token < w->tokens; token += MOST_TOKENS) {
        long left = w->tokens - token;
        switch (left < MOST_TOKENS ? left : MOST_TOKENS) {
            FOR_TOKENS(1) FOR_TOKENS(2) FOR_TOKENS(3) FOR_TOKENS(4) FOR_TOKENS(5) FOR_TOKENS(6) FOR_TOKENS(7) FOR_TOKENS(8)
        }
    }
}

static void groups_product(const void *work, long part) {
    const struct Work *w = work;
    long group = part * w->step, end = group + w->step < w->groups ? group + w->step : w->groups, first = 0;
    for (const struct Piece *piece = w->pieces; piece < w->pieces + w->count; first += piece->rows / GROUP, piece++) {
        int kind = (int)piece->kind;
        long bytes = w->columns / COLUMNS * GROUP * KINDS[kind].bytes;
        for (; group < end && group < first + piece->rows / GROUP; group++) {
            const uint8_t *block = piece->weight + (group - first) * bytes;
            if (KINDS[kind].planes == 2) group_by_tokens(w, kind, block, group * GROUP, 2, 0);
            else if (KINDS[kind].offset) group_by_tokens(w, kind, block, group * GROUP, 1, 1);
            else group_by_tokens(w, kind, block, group * GROUP, 1, 0);
        }
    }
}

// The sums of x over each block: [tokens, columns / 32]. In this order, whatever the number of threads.
static void block_sums(const uint16_t *x, long count, float *sums) {
    for (long at = 0; at < count; at++) {
        __m512i words = _mm512_loadu_si512(x + at * COLUMNS);
        __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
        __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        sums[at] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
}

void stoker_packed_product(const struct Work *w) {
    block_sums(w->x, w->tokens * (w->columns / COLUMNS), w->sums);
    pool_run(groups_product, w, (w->groups + w->step - 1) / w->step, w->threads);
}
