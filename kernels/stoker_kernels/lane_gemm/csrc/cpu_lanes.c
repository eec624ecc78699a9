// Weights of few bits, sixteen rows side by side (cpu_lanes.h), times activations in bf16, by AVX-512 BF16 (vdpbf16ps).
//
// Shapes: codes [rows, columns], x [tokens, columns] bf16, y [tokens, rows] bf16 or fp32.
// Invariants: a code's product is exact, sums are fp32, scales and zero points are applied to the sums of 32 columns, or of
// 16, and the result is rounded once; each row of y depends on its own row of x alone, whatever the number of tokens and
// threads.
#if !defined(__x86_64__)
#error "needs x86-64"
#endif
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#include <immintrin.h>

#include "cpu_lanes.h"
#include "cpu_pool.h"

#include "cpu_half_codes.h"

// Sixteen rows against `tokens` rows of x; planes, halves (scales of a unit) and tokens are constants where it is called.
INLINE void group_product(const struct Work *w, long token, long row, int planes, int halves, int tokens) {
    static const short PLAIN[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    long units = w->columns / COLUMNS, bytes = planes * PLANE;
    const uint8_t *codes = w->codes + row / GROUP * units * bytes;
    const uint16_t *x = (const uint16_t *)w->x + token * w->columns;
    __m512i low = table_of(planes == 2 ? PLAIN : LOW[w->numbers], 1), high = table_of(LOW[INTEGERS], 16);
    __m512 totals[MOST_TOKENS];
#pragma GCC unroll 8
    for (int m = 0; m < tokens; m++) totals[m] = _mm512_setzero_ps();
    for (long unit = 0; unit < units; unit++, codes += bytes, x += COLUMNS) {
        for (long line = 0; line < bytes; line += 64) _mm_prefetch((const char *)codes + AHEAD + line, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            __m512 dots[MOST_TOKENS][2];
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++) dots[m][0] = dots[m][1] = _mm512_setzero_ps();
            codes_product(codes, low, high, x, w->columns, dots, planes, half * 4 / halves, (half + 1) * 4 / halves,
                          tokens);
            long at = (unit * COLUMNS + half * COLUMNS / halves) / w->group * w->rows + row;
            Vector scales = scales_of(w, at);
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++)
                totals[m] = _mm512_fmadd_ps((__m512)scales, _mm512_add_ps(dots[m][0], dots[m][1]), totals[m]);
            if (!w->zeros) continue;
            __m512 offsets = (__m512)offsets_of(w, at, scales);
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++)
                totals[m] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(w->sums[(token + m) * units + unit]), totals[m]);
        }
    }
    for (int m = 0; m < tokens; m++) {
        Vector total = (Vector)totals[m];
        if (w->factors) total *= load(w->factors, row, FP32);
        if (w->bias) total += load(w->bias, row, FP32);
        store(w->y, (token + m) * w->rows + row, w->wide ? FP32 : BF16, total);
    }
}

#define FOR_TOKENS(count) \
    case count: group_product(w, token, row, planes, halves, count); break;

INLINE void group_by_tokens(const struct Work *w, long row, int planes, int halves) {
    for (long token = 0; token < w->tokens; token += MOST_TOKENS) {
        long left = w->tokens - token;
        switch (left < MOST_TOKENS ? left : MOST_TOKENS) {
            FOR_TOKENS(1) FOR_TOKENS(2) FOR_TOKENS(3) FOR_TOKENS(4) FOR_TOKENS(5) FOR_TOKENS(6) FOR_TOKENS(7) FOR_TOKENS(8)
        }
    }
}

static void groups_product(const void *work, long part) {
    const struct Work *w = work;
    long end = (part + 1) * w->step < w->rows / GROUP ? (part + 1) * w->step : w->rows / GROUP;
    for (long group = part * w->step; group < end; group++) {
        if (w->bits == 8) group_by_tokens(w, group * GROUP, 2, 1);
        else if (w->group == GROUP) group_by_tokens(w, group * GROUP, 1, 2);
        else group_by_tokens(w, group * GROUP, 1, 1);
    }
}

// The sums of x over each unit: [tokens, columns / 32]. In this order, whatever the number of threads.
static void unit_sums(const uint16_t *x, long count, float *sums) {
    for (long at = 0; at < count; at++)
        sums[at] = total(load(x, at * COLUMNS, BF16) + load(x, at * COLUMNS + LANES, BF16));
}

void stoker_lanes_product(const struct Work *w) {
    if (w->zeros) unit_sums(w->x, w->tokens * (w->columns / COLUMNS), w->sums);
    pool_run(groups_product, w, (w->rows / GROUP + w->step - 1) / w->step, w->threads);
}
