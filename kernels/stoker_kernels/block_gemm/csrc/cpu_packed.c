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

#include "cpu_packed_halves.h"
#include "cpu_pool.h"

#include "cpu_half_codes.h"

// Sixteen rows against `tokens` rows of x; planes, offset and tokens are constants where it is called.
INLINE void group_product(const struct Work *w, int kind, const uint8_t *block, long token, long row, int planes,
                          int offset, int tokens) {
    long blocks = w->columns / COLUMNS, bytes = planes * PLANE + (1 + offset) * 2 * GROUP;
    const uint16_t *x = (const uint16_t *)w->x + token * w->columns;
    const float *sums = w->sums + token * blocks;
    __m512i low = table_of(KINDS[kind].low, 1), high = table_of(KINDS[kind].high, 1);
    __m512 totals[MOST_TOKENS];
#pragma GCC unroll 8
    for (int m = 0; m < tokens; m++) totals[m] = w->bias ? _mm512_loadu_ps(w->bias + row) : _mm512_setzero_ps();
    for (long at = 0; at < blocks; at++, block += bytes, x += COLUMNS) {
        for (long line = 0; line < bytes; line += 64)
            _mm_prefetch((const char *)block + AHEAD + line, _MM_HINT_T0);
        __m512 dots[MOST_TOKENS][2];
#pragma GCC unroll 8
        for (int m = 0; m < tokens; m++) dots[m][0] = dots[m][1] = _mm512_setzero_ps();
        codes_product(block, low, high, x, w->columns, dots, planes, 0, 4, tokens);
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

static void groups_product(const void *work, long part) { walk_groups(work, part); }

void stoker_packed_product(const struct Work *w) {
    block_sums(w->x, w->tokens * (w->columns / COLUMNS), w->sums);
    pool_run(groups_product, w, (w->groups + w->step - 1) / w->step, w->threads);
}
