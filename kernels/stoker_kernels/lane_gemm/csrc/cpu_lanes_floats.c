// Weights of few bits, sixteen rows side by side (cpu_lanes.h), times activations in fp32, by any processor's vectors.
//
// Shapes: codes [rows, columns], x [tokens, columns] fp32, y [tokens, rows] fp32.
// Invariants: a code becomes fp32 exactly, its product is rounded once, with its sum; scales and zero points are applied to
// the sums of 32 columns, or of 16; each row of y depends on its own row of x alone, whatever the number of tokens and
// threads.
#include "cpu_lanes.h"
#include "cpu_pool.h"
#include "cpu_rows.h"

// The codes of a column; `low` and `high` are words of both planes, `shift` says which half byte of them.
INLINE Rows codes_of(RowWords low, RowWords high, int shift, int planes, const Rows *levels) {
    RowCodes code = (RowCodes)(low >> shift & 15);
    if (planes == 2) return __builtin_convertvector((code | (RowCodes)(high >> shift & 15) << 4) - 128, Rows);
    return level_of(levels, code);
}

// ROWS rows from `row` on, against `tokens` rows of x; planes, halves and tokens are constants where it is called.
INLINE void rows_product(const struct Work *w, long token, long row, int planes, int halves, int tokens) {
    long units = w->columns / COLUMNS, bytes = planes * PLANE, first = row % GROUP;
    const uint8_t *codes = w->codes + row / GROUP * units * bytes + 4 * first;
    const float *x = (const float *)w->x + token * w->columns;
    Rows levels[GROUP / ROWS], totals[MOST_TOKENS];
    for (int code = 0; code < GROUP; code++) levels[code / ROWS][code % ROWS] = (float)LOW[w->numbers][code];
    for (int m = 0; m < tokens; m++) totals[m] = all(0.0f);
    for (long unit = 0; unit < units; unit++, codes += bytes, x += COLUMNS) {
        for (int half = 0; half < halves; half++) {
            Rows dots[MOST_TOKENS][2];
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++) dots[m][0] = dots[m][1] = all(0.0f);
#pragma GCC unroll 1
            for (int part = half * 4 / halves; part < (half + 1) * 4 / halves; part++) {
                RowWords low, high = {0};
                memcpy(&low, codes + 64 * part, sizeof low);
                if (planes == 2) memcpy(&high, codes + PLANE + 64 * part, sizeof high);
#pragma GCC unroll 8
                for (int column = 0; column < 8; column++) {
                    Rows code = codes_of(low, high, 16 * (column % 2) + 4 * (column / 2), planes, levels);
#pragma GCC unroll 8
                    for (int m = 0; m < tokens; m++)
                        dots[m][column % 2] = add_product(code, all(x[m * w->columns + 8 * part + column]),
                                                          dots[m][column % 2]);
                }
            }
            // Of all sixteen rows, for these are what a vector of scales has.
            long at = (unit * COLUMNS + half * COLUMNS / halves) / w->group * w->rows + row - first;
            Vector sixteen = scales_of(w, at), beside = w->zeros ? offsets_of(w, at, sixteen) : sixteen;
            Rows scales, offsets;
            memcpy(&scales, (const char *)&sixteen + 4 * first, sizeof scales);
            memcpy(&offsets, (const char *)&beside + 4 * first, sizeof offsets);
#pragma GCC unroll 8
            for (int m = 0; m < tokens; m++) {
                totals[m] = add_product(scales, dots[m][0] + dots[m][1], totals[m]);
                if (w->zeros) totals[m] = add_product(offsets, all(w->sums[(token + m) * units + unit]), totals[m]);
            }
        }
    }
    Rows factors = all(1.0f), bias = all(0.0f);
    if (w->factors) memcpy(&factors, w->factors + row, sizeof factors);
    if (w->bias) memcpy(&bias, w->bias + row, sizeof bias);
    for (int m = 0; m < tokens; m++) {
        totals[m] = totals[m] * factors + bias;
        memcpy((float *)w->y + (token + m) * w->rows + row, &totals[m], sizeof totals[m]);
    }
}

// Tokens in parts of a power of two: a variant for each number of them takes a compiler long.
INLINE void rows_by_tokens(const struct Work *w, long row, int planes, int halves) {
    long token = 0;
    for (; w->tokens - token >= MOST_TOKENS; token += MOST_TOKENS)
        rows_product(w, token, row, planes, halves, MOST_TOKENS);
#if MOST_TOKENS > 4
    if (w->tokens - token >= 4) rows_product(w, token, row, planes, halves, 4), token += 4;
#endif
    if (w->tokens - token >= 2) rows_product(w, token, row, planes, halves, 2), token += 2;
    if (w->tokens - token >= 1) rows_product(w, token, row, planes, halves, 1);
}

static void groups_product(const void *work, long part) {
    const struct Work *w = work;
    long end = (part + 1) * w->step * GROUP < w->rows ? (part + 1) * w->step * GROUP : w->rows;
    for (long row = part * w->step * GROUP; row < end; row += ROWS) {
        if (w->bits == 8) rows_by_tokens(w, row, 2, 1);
        else if (w->group == GROUP) rows_by_tokens(w, row, 1, 2);
        else rows_by_tokens(w, row, 1, 1);
    }
}

void stoker_lanes_floats_product(const struct Work *w) {
    for (long at = 0; w->zeros && at < w->tokens * (w->columns / COLUMNS); at++)
        w->sums[at] = total(load(w->x, at * COLUMNS, FP32) + load(w->x, at * COLUMNS + LANES, FP32));
    pool_run(groups_product, w, (w->rows / GROUP + w->step - 1) / w->step, w->threads);
}
