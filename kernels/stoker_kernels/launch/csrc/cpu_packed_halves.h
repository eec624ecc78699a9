// What products of packed blocks with activations in bf16 share: by vectors (cpu_packed.c) and by tiles.
#pragma once
#include <immintrin.h>

#include "cpu_packed_order.h"

// Sixteen rows from `row` on against all tokens, as each source has it; planes and offset are constants.
static inline __attribute__((always_inline)) void group_by_tokens(const struct Work *w, int kind, const uint8_t *block,
                                                                  long row, int planes, int offset);

static inline __attribute__((always_inline)) __m512 scales_at(const uint8_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

// The groups of one part, of whatever pieces they are.
static inline __attribute__((always_inline)) void walk_groups(const struct Work *w, long part) {
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
