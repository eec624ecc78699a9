// Weights in GGUF's blocks, multiplied where they lie: a row's blocks become floats a tile at a time, in the first cache,
// and each tile meets every row of x before the next one is unpacked.
//
// Shapes: weight [rows, row_bytes], x [tokens, columns] fp32, y [tokens, stride] fp32; columns fill whole blocks.
// Invariants: a value is computed in the steps of the format's definition, each rounded to fp32 (compile with
// -ffp-contract=off), so it is bit-equal to any right decoder's; each row of y depends on its own row of x alone.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "cpu_half.h"

#define TILE 256
#define LANES 16
#define ROWS 4
#define MOST_TOKENS 16
#define MOST_THREADS 64

typedef void (*Unpack)(const uint8_t *block, float *out);

// ---- blocks of 32 ----

static void q8_0(const uint8_t *b, float *out) {
    const int8_t *codes = (const int8_t *)(b + 2);
    float d = half(b);
    for (int i = 0; i < 32; i++) out[i] = (float)codes[i] * d;
}

static void q4_0(const uint8_t *b, float *out) {
    float d = half(b);
    for (int i = 0; i < 16; i++) out[i] = d * (float)((b[2 + i] & 15) - 8);
    for (int i = 0; i < 16; i++) out[16 + i] = d * (float)((b[2 + i] >> 4) - 8);
}

static void q4_1(const uint8_t *b, float *out) {
    float d = half(b), m = half(b + 2);
    for (int i = 0; i < 16; i++) out[i] = d * (float)(b[4 + i] & 15) + m;
    for (int i = 0; i < 16; i++) out[16 + i] = d * (float)(b[4 + i] >> 4) + m;
}

static inline void five_bits(const uint8_t *high, const uint8_t *low, int *codes) {
    uint32_t fifth;
    memcpy(&fifth, high, 4);
    for (int i = 0; i < 16; i++) codes[i] = (low[i] & 15) | (int)((fifth >> i) & 1) << 4;
    for (int i = 0; i < 16; i++) codes[16 + i] = low[i] >> 4 | (int)((fifth >> (16 + i)) & 1) << 4;
}

static void q5_0(const uint8_t *b, float *out) {
    int codes[32];
    float d = half(b);
    five_bits(b + 2, b + 6, codes);
    for (int i = 0; i < 32; i++) out[i] = d * (float)(codes[i] - 16);
}

static void q5_1(const uint8_t *b, float *out) {
    int codes[32];
    float d = half(b), m = half(b + 2);
    five_bits(b + 4, b + 8, codes);
    for (int i = 0; i < 32; i++) out[i] = d * (float)codes[i] + m;
}

static const float LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline void levels(const uint8_t *low, float d, float *out) {
    for (int i = 0; i < 16; i++) out[i] = d * LEVELS[low[i] & 15];
    for (int i = 0; i < 16; i++) out[16 + i] = d * LEVELS[low[i] >> 4];
}

static void iq4_nl(const uint8_t *b, float *out) { levels(b + 2, half(b), out); }

// ---- blocks of 256 ----

static void iq4_xs(const uint8_t *b, float *out) {
    float d = half(b);
    uint16_t high;
    memcpy(&high, b + 2, 2);
    for (int g = 0; g < 8; g++) {
        int low = b[4 + g / 2] >> 4 * (g % 2) & 15;
        levels(b + 8 + 16 * g, d * (float)((low | (high >> 2 * g & 3) << 4) - 32), out + 32 * g);
    }
}

static void q2_k(const uint8_t *b, float *out) {
    float d = half(b + 80), dmin = half(b + 82);
    for (int g = 0; g < 16; g++) {
        const uint8_t *codes = b + 16 + 32 * (g / 8) + 16 * (g % 2);
        int shift = 2 * (g % 8 / 2);
        float scale = d * (float)(b[g] & 15), low = dmin * (float)(b[g] >> 4);
        for (int i = 0; i < 16; i++) out[16 * g + i] = scale * (float)(codes[i] >> shift & 3) - low;
    }
}

static void q3_k(const uint8_t *b, float *out) {
    const uint8_t *scales = b + 96;
    float d = half(b + 108);
    for (int g = 0; g < 16; g++) {
        int six = (scales[g % 8] >> 4 * (g / 8) & 15) | (scales[8 + g % 4] >> 2 * (g / 4) & 3) << 4;
        const uint8_t *codes = b + 32 + 32 * (g / 8) + 16 * (g % 2), *mask = b + 16 * (g % 2);
        int shift = 2 * (g % 8 / 2), bit = g / 2;
        float scale = d * (float)(six - 32);
        for (int i = 0; i < 16; i++)
            out[16 * g + i] = scale * (float)((codes[i] >> shift & 3) - (mask[i] >> bit & 1 ? 0 : 4));
    }
}

// Six bits each: of scale `g`, and of what is taken off.
static inline void scale_and_low(const uint8_t *s, int g, int *scale, int *low) {
    *scale = g < 4 ? s[g] & 63 : (s[4 + g] & 15) | (s[g - 4] >> 2 & 48);
    *low = g < 4 ? s[4 + g] & 63 : s[4 + g] >> 4 | (s[g] >> 2 & 48);
}

static void q4_k(const uint8_t *b, float *out) {
    float d = half(b), dmin = half(b + 2);
    for (int g = 0; g < 8; g++) {
        const uint8_t *codes = b + 16 + 32 * (g / 2);
        int scale, low, shift = 4 * (g % 2);
        scale_and_low(b + 4, g, &scale, &low);
        float ds = d * (float)scale, dl = dmin * (float)low;
        for (int i = 0; i < 32; i++) out[32 * g + i] = ds * (float)(codes[i] >> shift & 15) - dl;
    }
}

static void q5_k(const uint8_t *b, float *out) {
    float d = half(b), dmin = half(b + 2);
    for (int g = 0; g < 8; g++) {
        const uint8_t *codes = b + 48 + 32 * (g / 2), *fifth = b + 16;
        int scale, low, shift = 4 * (g % 2);
        scale_and_low(b + 4, g, &scale, &low);
        float ds = d * (float)scale, dl = dmin * (float)low;
        for (int i = 0; i < 32; i++)
            out[32 * g + i] = ds * (float)((codes[i] >> shift & 15) | (fifth[i] >> g & 1) << 4) - dl;
    }
}

static void q6_k(const uint8_t *b, float *out) {
    const int8_t *scales = (const int8_t *)(b + 192);
    float d = half(b + 208);
    for (int g = 0; g < 8; g++) {
        const uint8_t *low = b + 64 * (g / 4) + 32 * (g % 2), *high = b + 128 + 32 * (g / 4);
        int shift = 4 * (g % 4 / 2), above = 2 * (g % 4);
        for (int part = 0; part < 2; part++) {
            float scale = d * (float)scales[2 * g + part];
            for (int i = 16 * part; i < 16 * part + 16; i++)
                out[32 * g + i] = scale * (float)(((low[i] >> shift & 15) | (high[i] >> above & 3) << 4) - 32);
        }
    }
}

// The order is that of FORMATS in formats.py.
static const struct { Unpack unpack; int columns, bytes; } KINDS[] = {
    {q8_0, 32, 34}, {q4_0, 32, 18}, {q4_1, 32, 20}, {q5_0, 32, 22}, {q5_1, 32, 24}, {iq4_nl, 32, 18},
    {iq4_xs, 256, 136}, {q2_k, 256, 84}, {q3_k, 256, 110}, {q4_k, 256, 144}, {q5_k, 256, 176}, {q6_k, 256, 210},
};

// Values [from, from + count) of a row, where both fall on block borders.
static inline void unpack_part(int kind, const uint8_t *row, long from, long count, float *out) {
    int columns = KINDS[kind].columns, bytes = KINDS[kind].bytes;
    const uint8_t *block = row + from / columns * bytes;
    for (long at = 0; at < count; at += columns, block += bytes) KINDS[kind].unpack(block, out + at);
}

// ---- products ----

typedef float Vector __attribute__((vector_size(4 * LANES)));

static inline Vector load(const float *at) {
    Vector found;
    memcpy(&found, at, sizeof found);
    return found;
}

static inline Vector multiply_add(Vector a, Vector b, Vector sum) {
    for (int lane = 0; lane < LANES; lane++) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
    return sum;
}

struct Work {
    int kind;
    const uint8_t *weight;
    long row_bytes, first, last, columns, tokens, stride;
    const float *x;
    float *y;
};

// A tile of ROWS rows against `tokens` rows of x, a constant where it is called, so that the sums stay in registers.
static inline __attribute__((always_inline)) void tile_product(float tile[ROWS][TILE], const float *x, long columns,
                                                               long count, Vector (*sums)[ROWS], int tokens) {
    Vector kept[4][ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < tokens; m++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) kept[m][r] = sums[m][r];
    for (long i = 0; i < count; i += LANES) {
        Vector weights[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) weights[r] = load(tile[r] + i);
#pragma GCC unroll 4
        for (int m = 0; m < tokens; m++) {
            Vector values = load(x + m * columns + i);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) kept[m][r] = multiply_add(weights[r], values, kept[m][r]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < tokens; m++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[m][r] = kept[m][r];
}

static float total(Vector sum) {
    float lanes[LANES];
    memcpy(lanes, &sum, sizeof sum);
    for (int wide = LANES / 2; wide; wide /= 2)
        for (int lane = 0; lane < wide; lane++) lanes[lane] += lanes[lane + wide];
    return lanes[0];
}

// Rows [n, n + ROWS) against tokens [token, token + tokens) of at most MOST_TOKENS. Rows beyond the last are the last.
static void rows_by_tokens(const struct Work *w, long n, long token, int tokens) {
    float tile[ROWS][TILE];
    Vector sums[MOST_TOKENS][ROWS];
    memset(sums, 0, sizeof sums);
    for (long k = 0; k < w->columns; k += TILE) {
        long count = w->columns - k < TILE ? w->columns - k : TILE;
        for (int r = 0; r < ROWS; r++) {
            long row = n + r < w->last ? n + r : w->last - 1;
            unpack_part(w->kind, w->weight + row * w->row_bytes, k, count, tile[r]);
        }
        int m = 0;
        for (; m + 4 <= tokens; m += 4)
            tile_product(tile, w->x + (token + m) * w->columns + k, w->columns, count, sums + m, 4);
        for (; m < tokens; m++)
            tile_product(tile, w->x + (token + m) * w->columns + k, w->columns, count, sums + m, 1);
    }
    for (int m = 0; m < tokens; m++)
        for (int r = 0; r < ROWS && n + r < w->last; r++) w->y[(token + m) * w->stride + n + r] = total(sums[m][r]);
}

static void *rows_product(void *work) {
    const struct Work *w = work;
    for (long n = w->first; n < w->last; n += ROWS)
        for (long token = 0; token < w->tokens; token += MOST_TOKENS) {
            long left = w->tokens - token;
            rows_by_tokens(w, n, token, (int)(left < MOST_TOKENS ? left : MOST_TOKENS));
        }
    return 0;
}

// y[m, n] = sum over k of weight[n, k] · x[m, k], by up to `threads` threads.
void stoker_block_product(int kind, const uint8_t *weight, long row_bytes, long rows, long columns, const float *x,
                          long tokens, float *y, long stride, int threads) {
    struct Work works[MOST_THREADS];
    pthread_t helpers[MOST_THREADS];
    int made[MOST_THREADS] = {0};
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1 || rows < threads) threads = 1;
    for (int t = 0; t < threads; t++)
        works[t] = (struct Work){kind, weight, row_bytes, rows * t / threads, rows * (t + 1) / threads,
                                 columns, tokens, stride, x, y};
    // Where no thread can be had, its part is computed here.
    for (int t = 1; t < threads; t++) made[t] = pthread_create(&helpers[t], 0, rows_product, &works[t]) == 0;
    rows_product(&works[0]);
    for (int t = 1; t < threads; t++) {
        if (made[t]) pthread_join(helpers[t], 0);
        else rows_product(&works[t]);
    }
}

// Rows `ids` (or the first `count`, where ids is 0) as fp32 [count, columns].
void stoker_block_rows(int kind, const uint8_t *weight, long row_bytes, const int64_t *ids, long count, long columns,
                       float *out) {
    for (long at = 0; at < count; at++)
        unpack_part(kind, weight + (ids ? ids[at] : at) * row_bytes, 0, columns, out + at * columns);
}

// The first `count` rows as bf16, rounded to nearest even; the values are finite.
void stoker_block_rows_bf16(int kind, const uint8_t *weight, long row_bytes, long count, long columns, uint16_t *out) {
    float tile[TILE];
    for (long row = 0; row < count; row++)
        for (long k = 0; k < columns; k += TILE) {
            long part = columns - k < TILE ? columns - k : TILE;
            unpack_part(kind, weight + row * row_bytes, k, part, tile);
            for (long i = 0; i < part; i++) {
                uint32_t bits;
                memcpy(&bits, tile + i, 4);
                out[row * columns + k + i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
        }
}
