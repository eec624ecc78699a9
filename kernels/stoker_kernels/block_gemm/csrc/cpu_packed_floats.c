// Weights in blocks of 32 columns of GGUF: packed, and multiplied with activations in fp32 by any processor's vectors.
//
// They lie as cpu_packed_order.h says. A code becomes an fp32 number in its lane, which is exact.
//
// Shapes: weight [rows, row_bytes], x [tokens, columns] fp32, y [tokens, stride] fp32.
// Invariants: a code's product is rounded once, with its sum; scales and offsets are applied to the sums of a block; each
// row of y depends on its own row of x alone, whatever the number of tokens and threads.
#include <stdlib.h>
#include <string.h>

#include "cpu_half.h"
#include "cpu_packed_order.h"
#include "cpu_pool.h"
#include "cpu_rows.h"

// ---- packing ----

static inline int plain_code(int kind, const uint8_t *block, int column) {
    if (KINDS[kind].planes == 2) return block[2 + column];
    int byte = block[(KINDS[kind].offset ? 4 : 2) + column % 16];
    return column < 16 ? byte & 15 : byte >> 4;
}

// Where the code of (row, column) lies in its plane: a vector has two columns of each row side by side, and four pairs
// of columns in the four half bytes of its words.
static inline long place(int row, int column, int *shift) {
    int pair = column / 2;
    *shift = 4 * (pair % 4);
    return 64 * (pair / 4) + 4 * row + 2 * (column % 2);
}

static void pack_block(int kind, uint8_t *const rows[GROUP], uint8_t *out) {
    int planes = KINDS[kind].planes;
    uint16_t words[2 * PLANE / 2];
    memset(words, 0, sizeof words);
    for (int row = 0; row < GROUP; row++) {
        for (int column = 0; column < COLUMNS; column++) {
            int shift, code = plain_code(kind, rows[row], column);
            long at = place(row, column, &shift) / 2;
            words[at] |= (uint16_t)((code & 15) << shift);
            if (planes == 2) words[PLANE / 2 + at] |= (uint16_t)((code >> 4) << shift);
        }
        for (int part = 0; part <= KINDS[kind].offset; part++)
            memcpy(out + planes * PLANE + part * 2 * GROUP + 2 * row, rows[row] + 2 * part, 2);
    }
    memcpy(out, words, (size_t)(planes * PLANE));
}

// Packs in place; rows are a multiple of 16, columns of 32. Returns 0, or 1 where there is no memory.
int stoker_pack(int kind, uint8_t *weight, long rows, long columns) {
    long blocks = columns / COLUMNS, bytes = KINDS[kind].bytes, group_bytes = GROUP * blocks * bytes;
    uint8_t *plain = malloc((size_t)group_bytes);
    if (!plain) return 1;
    for (long group = 0; group < rows / GROUP; group++) {
        uint8_t *out = weight + group * group_bytes;
        memcpy(plain, out, (size_t)group_bytes);
        for (long block = 0; block < blocks; block++, out += GROUP * bytes) {
            uint8_t *heads[GROUP];
            for (int row = 0; row < GROUP; row++) heads[row] = plain + (row * blocks + block) * bytes;
            pack_block(kind, heads, out);
        }
    }
    free(plain);
    return 0;
}

// Values of rows `ids`, or of the first `count` where ids is 0, as the format defines them: [count, columns] of `type`.
// `bad` gets an id that is not there, if there is one; its row is zeros.
struct Lookup {
    const uint8_t *weight;
    const void *ids;
    void *out;
    long *bad;
    long rows, count, columns;
    int kind, wide_ids, type;
};

static void unpack_block(int kind, const uint8_t *block, int row, float *values) {
    int planes = KINDS[kind].planes;
    const uint8_t *scales = block + planes * PLANE + 2 * row;
    float scale = half(scales), offset = KINDS[kind].offset ? half(scales + 2 * GROUP) : 0.0f;
    for (int column = 0; column < COLUMNS; column++) {
        int shift;
        long where = place(row, column, &shift);
        uint16_t low, high = 0;
        memcpy(&low, block + where, 2);
        if (planes == 2) memcpy(&high, block + PLANE + where, 2);
        int code = KINDS[kind].low[low >> shift & 15] + KINDS[kind].high[high >> shift & 15];
        float value = scale * (float)code;
        values[column] = KINDS[kind].offset ? value + offset : value;
    }
}

void stoker_packed_rows(const struct Lookup *w) {
    long bytes = GROUP * KINDS[w->kind].bytes;
    for (long at = 0; at < w->count; at++) {
        long id = !w->ids ? at : w->wide_ids ? ((const int64_t *)w->ids)[at] : ((const int32_t *)w->ids)[at];
        int there = id >= 0 && id < w->rows;
        if (!there) *w->bad = id;
        const uint8_t *block = w->weight + (there ? id / GROUP * (w->columns / COLUMNS) * bytes : 0);
        for (long first = 0; first < w->columns; first += COLUMNS, block += bytes) {
            float values[COLUMNS] = {0};
            if (there) unpack_block(w->kind, block, (int)(id % GROUP), values);
            for (int part = 0; part < COLUMNS; part += LANES)
                store(w->out, at * w->columns + first + part, w->type, load(values, part, FP32));
        }
    }
}

// ---- products ----

enum { WIDE, SHIFTED, OFFSET, LEVELS };  // the order is that of KINDS

typedef uint16_t RowHalves __attribute__((vector_size(2 * ROWS)));

// The codes of a column; `low` and `high` are words of both planes, `shift` says which half byte of them.
INLINE Rows codes_of(RowWords low, RowWords high, int shift, int kind, const Rows *levels) {
    RowCodes code = (RowCodes)(low >> shift & 15);
    if (kind == LEVELS) return level_of(levels, code);
    if (kind == WIDE) code |= (RowCodes)(high << (28 - shift)) >> 24 & ~15;
    if (kind == SHIFTED) code -= 8;
    return __builtin_convertvector(code, Rows);
}

// Numbers in fp16. A product by 2^112 makes those without a leading one right, too.
INLINE Rows scales_at(const uint8_t *at) {
    RowHalves halves;
    memcpy(&halves, at, sizeof halves);
    RowWords bits = __builtin_convertvector(halves, RowWords);
    Rows value = (Rows)((bits & 0x7fff) << 13) * 0x1p112f;
    RowWords beyond = (RowWords)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Rows)((RowWords)value | beyond | (bits & 0x8000) << 16);
}

// ROWS rows of a group, from `first` on, against `tokens` rows of x; kind and tokens are constants where it is called.
INLINE void rows_product(const struct Work *w, const uint8_t *block, long token, long group, int first, int kind,
                         int tokens) {
    long blocks = w->columns / COLUMNS, row = group * GROUP + first;
    const uint8_t *scales = block + KINDS[kind].planes * PLANE + 2 * first;
    const float *x = (const float *)w->x + token * w->columns, *sums = w->sums + token * blocks;
    Rows levels[GROUP / ROWS], totals[MOST_TOKENS];
    for (int code = 0; code < GROUP; code++) levels[code / ROWS][code % ROWS] = (float)KINDS[kind].low[code];
    for (int m = 0; m < tokens; m++) {
        totals[m] = all(0.0f);
        if (w->bias) memcpy(&totals[m], w->bias + row, sizeof totals[m]);
    }
    for (long at = 0; at < blocks; at++, x += COLUMNS) {
        // Two sums in turn, for the instruction's latency is longer than one can hide.
        Rows dots[MOST_TOKENS][2];
#pragma GCC unroll 8
        for (int m = 0; m < tokens; m++) dots[m][0] = dots[m][1] = all(0.0f);
#pragma GCC unroll 1
        for (int part = 0; part < 4; part++) {
            RowWords low, high = {0};
            memcpy(&low, block + 64 * part + 4 * first, sizeof low);
            if (kind == WIDE) memcpy(&high, block + PLANE + 64 * part + 4 * first, sizeof high);
#pragma GCC unroll 8
            for (int column = 0; column < 8; column++) {
                Rows code = codes_of(low, high, 4 * (column / 2) + 16 * (column % 2), kind, levels);
#pragma GCC unroll 8
                for (int m = 0; m < tokens; m++) {
                    Rows value = all(x[m * w->columns + 8 * part + column]);
                    dots[m][column % 2] = add_product(code, value, dots[m][column % 2]);
                }
            }
        }
        Rows scale = scales_at(scales), offset = kind == OFFSET ? scales_at(scales + 2 * GROUP) : scale;
#pragma GCC unroll 8
        for (int m = 0; m < tokens; m++) {
            totals[m] = add_product(scale, dots[m][0] + dots[m][1], totals[m]);
            if (kind == OFFSET) totals[m] = add_product(offset, all(sums[m * blocks + at]), totals[m]);
        }
        block += GROUP * KINDS[kind].bytes;
        scales += GROUP * KINDS[kind].bytes;
    }
    for (int m = 0; m < tokens; m++)
        memcpy((float *)w->y + (token + m) * w->stride + row, &totals[m], sizeof totals[m]);
}

INLINE void group_product(const struct Work *w, const uint8_t *block, long token, long group, int kind, int tokens) {
    for (int first = 0; first < GROUP; first += ROWS) rows_product(w, block, token, group, first, kind, tokens);
}

// Tokens in parts of a power of two: a variant for each number of them takes a compiler long.
INLINE void group_by_tokens(const struct Work *w, const uint8_t *block, long group, int kind) {
    long token = 0;
    for (; w->tokens - token >= MOST_TOKENS; token += MOST_TOKENS)
        group_product(w, block, token, group, kind, MOST_TOKENS);
#if MOST_TOKENS > 4
    if (w->tokens - token >= 4) group_product(w, block, token, group, kind, 4), token += 4;
#endif
    if (w->tokens - token >= 2) group_product(w, block, token, group, kind, 2), token += 2;
    if (w->tokens - token >= 1) group_product(w, block, token, group, kind, 1);
}

static void groups_product(const void *work, long part) {
    const struct Work *w = work;
    long group = part * w->step, end = group + w->step < w->groups ? group + w->step : w->groups, first = 0;
    for (const struct Piece *piece = w->pieces; piece < w->pieces + w->count; first += piece->rows / GROUP, piece++) {
        long bytes = w->columns / COLUMNS * GROUP * KINDS[piece->kind].bytes;
        for (; group < end && group < first + piece->rows / GROUP; group++) {
            const uint8_t *block = piece->weight + (group - first) * bytes;
            switch (piece->kind) {
                case WIDE: group_by_tokens(w, block, group, WIDE); break;
                case SHIFTED: group_by_tokens(w, block, group, SHIFTED); break;
                case OFFSET: group_by_tokens(w, block, group, OFFSET); break;
                default: group_by_tokens(w, block, group, LEVELS);
            }
        }
    }
}

void stoker_packed_floats_product(const struct Work *w) {
    for (long at = 0; at < w->tokens * (w->columns / COLUMNS); at++)
        w->sums[at] = total(load(w->x, at * COLUMNS, FP32) + load(w->x, at * COLUMNS + LANES, FP32));
    pool_run(groups_product, w, (w->groups + w->step - 1) / w->step, w->threads);
}
