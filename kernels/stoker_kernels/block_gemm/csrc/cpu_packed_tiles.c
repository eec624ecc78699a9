// Weights in blocks of 32 columns of GGUF, multiplied with activations in bf16 by AMX: a tile of 16 tokens × 16 rows at once.
//
// They lie as cpu_packed_order.h says. Of sixteen rows some blocks become bf16 in the first cache, pairs of columns side by
// side, as a tile reads them; then they meet all tokens. Half codes become bf16 by one permutation, which is exact.
//
// Shapes: weight [rows, row_bytes], x [tokens, columns] bf16, y [tokens, stride] bf16 or fp32.
// Invariants: a product is exact, sums are fp32, scales and offsets are applied to the sums of a block, and the result is
// rounded once; each row of y depends on its own row of x alone, whatever the number of tokens and threads. Nothing runs
// before `stoker_tiles_allowed` said yes, on a processor with AMX BF16 and AVX-512 BF16.
#if !defined(__x86_64__)
#error "needs x86-64"
#endif
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#include <immintrin.h>

#include "cpu_packed_halves.h"
#include "cpu_pool.h"

#include "cpu_half_codes.h"

#define TILE 16
// Blocks that are decoded before they are multiplied, and tokens that they meet.
#define BLOCKS 4
#define TOKENS_AT_ONCE 64

// Linux lets a process have tiles when it asks.
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

// Tiles, whose numbers stand in the assembler's names: sums, x, and both planes of the weight, of 16 tokens; sums and x of
// the tokens that are left.
#define SUMS 0
#define X 1
#define LOW 2
#define HIGH 3
#define LAST_SUMS 4
#define LAST_X 5

struct Shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

// A plane of a block's codes as bf16: 16 pairs of columns, of 16 rows each.
INLINE void decode(const uint8_t *codes, __m512i table, uint16_t *out) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
        __m512i words = _mm512_loadu_si512(codes + 64 * part);
#pragma GCC unroll 4
        for (int nibble = 0; nibble < 4; nibble++)
            _mm512_store_si512(out + 32 * (4 * part + nibble),
                               _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * nibble), table));
    }
}

#define TILE_PRODUCT(sums, x_tile, x, columns, weight, planes, out) \
    do { \
        _tile_zero(sums); \
        _tile_loadd(x_tile, x, 2 * (columns)); \
        _tile_loadd(LOW, weight, 64); \
        _tile_dpbf16ps(sums, x_tile, LOW); \
        if ((planes) == 2) { \
            _tile_loadd(HIGH, (weight) + 512, 64); \
            _tile_dpbf16ps(sums, x_tile, HIGH); \
        } \
        _tile_stored(sums, out, 64); \
    } while (0)

// What one group of sixteen rows has at hand: planes and offset are constants where it is made.
struct Group {
    const uint8_t *weight;
    __m512i low, high;
    long blocks, bytes;
    int planes, offset;
};

INLINE void decode_block(const struct Group *g, long at, uint16_t (*out)[512]) {
    const uint8_t *block = g->weight + at * g->bytes;
    for (long line = 0; line < g->bytes; line += 64) _mm_prefetch((const char *)block + AHEAD + line, _MM_HINT_T0);
    decode(block, g->low, out[0]);
    if (g->planes == 2) decode(block + PLANE, g->high, out[1]);
}

// Block `at`, decoded, against up to 16 tokens from `token` on.
INLINE void add_block(const struct Work *w, const struct Group *g, long at, const uint16_t (*decoded)[512], long token,
                      int rows, float (*dots)[GROUP], float (*totals)[GROUP]) {
    const uint16_t *x = (const uint16_t *)w->x + token * w->columns + at * COLUMNS;
    const float *sums = w->sums + token * g->blocks + at;
    const uint8_t *scales = g->weight + at * g->bytes + g->planes * PLANE;
    if (rows == TILE) TILE_PRODUCT(SUMS, X, x, w->columns, decoded[0], g->planes, dots);
    else TILE_PRODUCT(LAST_SUMS, LAST_X, x, w->columns, decoded[0], g->planes, dots);
    __m512 scale = scales_at(scales), lows = g->offset ? scales_at(scales + 2 * GROUP) : scale;
    for (int i = 0; i < rows; i++) {
        __m512 total = _mm512_fmadd_ps(scale, _mm512_load_ps(dots[i]), _mm512_load_ps(totals[i]));
        if (g->offset) total = _mm512_fmadd_ps(lows, _mm512_set1_ps(sums[i * g->blocks]), total);
        _mm512_store_ps(totals[i], total);
    }
}

// Sixteen rows against `tokens` rows of x; planes and offset are constants where it is called.
INLINE void group_product(const struct Work *w, int kind, const uint8_t *weight, long token, int tokens, long row,
                          int planes, int offset) {
    static _Thread_local uint16_t decoded[BLOCKS][2][512] __attribute__((aligned(64)));
    static _Thread_local float totals[TOKENS_AT_ONCE][GROUP] __attribute__((aligned(64)));
    static _Thread_local float dots[2][TILE][GROUP] __attribute__((aligned(64)));
    struct Group g = {weight, table_of(KINDS[kind].low, 1), table_of(KINDS[kind].high, 1), w->columns / COLUMNS,
                      planes * PLANE + (1 + offset) * 2 * GROUP, planes, offset};
    __m512 bias = w->bias ? _mm512_loadu_ps(w->bias + row) : _mm512_setzero_ps();
    for (int m = 0; m < tokens; m++) _mm512_store_ps(totals[m], bias);
    for (long first = 0; first < g.blocks; first += BLOCKS) {
        int count = g.blocks - first < BLOCKS ? (int)(g.blocks - first) : BLOCKS;
        for (int at = 0; at < count; at++) decode_block(&g, first + at, decoded[at]);
        for (int m = 0; m < tokens; m += TILE)
            for (int at = 0; at < count; at++)
                add_block(w, &g, first + at, decoded[at], token + m, tokens - m < TILE ? tokens - m : TILE, dots[at % 2],
                          totals + m);
    }
    for (int m = 0; m < tokens; m++) {
        long place = (token + m) * w->stride + row;
        __m512 total = _mm512_load_ps(totals[m]);
        if (w->wide) _mm512_storeu_ps((float *)w->y + place, total);
        else _mm256_storeu_si256((__m256i *)((uint16_t *)w->y + place), (__m256i)_mm512_cvtneps_pbh(total));
    }
}

INLINE void group_by_tokens(const struct Work *w, int kind, const uint8_t *block, long row, int planes, int offset) {
    for (long token = 0; token < w->tokens; token += TOKENS_AT_ONCE) {
        long left = w->tokens - token;
        group_product(w, kind, block, token, (int)(left < TOKENS_AT_ONCE ? left : TOKENS_AT_ONCE), row, planes, offset);
    }
}

static void groups_product(const void *work, long part) {
    const struct Work *w = work;
    struct Shapes shapes = {.palette = 1};
    for (int tile = SUMS; tile <= LAST_X; tile++) {
        shapes.bytes[tile] = 64;
        shapes.rows[tile] = TILE;
    }
    shapes.rows[LAST_SUMS] = shapes.rows[LAST_X] = w->tokens % TILE ? (uint8_t)(w->tokens % TILE) : TILE;
    _tile_loadconfig(&shapes);
    walk_groups(w, part);
    _tile_release();
}

void stoker_packed_tiles_product(const struct Work *w) {
    block_sums(w->x, w->tokens * (w->columns / COLUMNS), w->sums);
    pool_run(groups_product, w, (w->groups + w->step - 1) / w->step, w->threads);
}

// Asks the system for tiles, for this process and all of its threads: whether it gives them.
int stoker_tiles_allowed(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
