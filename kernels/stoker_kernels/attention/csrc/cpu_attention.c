// Attention of rows that decode one token each, over paged keys and values.
//
// Shapes: q, out [rows, Hq, D]; caches [pages, Hkv, page, D], of one type; table [slots, stride] int32.
// Invariants: D is a multiple of 16; logits, weights and sums are fp32, the result is rounded once; no key beyond a row's
// length is read, nor its page's number, which are the caller's to hold within the cache; each row depends on itself alone. A row of length 0 gives zeros.
#include "cpu_floats.h"
#include "cpu_pool.h"

#define MOST_VECTORS 16
#define KEYS 64

struct Work {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int32_t *table, *slots, *lengths;
    long stride, rows, q_heads, kv_heads, dim, page, window;
    float scale;
    int type, threads;
};

// Where the keys [first, first + count) of a head lie, and their values. A division a key would cost as much as its dot.
INLINE void places(const struct Work *w, long row, long head, long first, long count, long *at) {
    const int32_t *table = w->table + w->slots[row] * w->stride;
    long page = first / w->page, within = first % w->page;
    for (long i = 0; i < count; page++, within = 0) {
        long start = (table[page] * w->kv_heads + head) * w->page * w->dim;
        for (; within < w->page && i < count; within++, i++) at[i] = start + within * w->dim;
    }
}

// One query head over keys [first, last), KEYS at a time, with a running maximum.
INLINE void one_head(const struct Work *w, long row, long q_head, long first, long last, int vectors, int type) {
    long head = q_head / (w->q_heads / w->kv_heads), at_q = (row * w->q_heads + q_head) * w->dim;
    Vector query[MOST_VECTORS], sums[MOST_VECTORS];
    for (int part = 0; part < vectors; part++) {
        query[part] = load(w->q, at_q + part * LANES, type) * w->scale;
        sums[part] = (Vector){0};
    }
    float most = -__builtin_inff(), weight = 0.0f;
    for (long key = first; key < last; key += KEYS) {
        float logits[KEYS];
        long at[KEYS], count = last - key < KEYS ? last - key : KEYS;
        places(w, row, head, key, count, at);
        float highest = most;
        for (long i = 0; i < count; i++) {
            Vector dot = {0};
            for (int part = 0; part < vectors; part++)
                dot = multiply_add(query[part], load(w->k_cache, at[i] + part * LANES, type), dot);
            logits[i] = total(dot);
            if (!(logits[i] <= highest)) highest = logits[i];
        }
        for (long i = count; i < KEYS; i++) logits[i] = -__builtin_inff();
        float shrink = total(exponential(spread(most - highest))) / LANES;
        for (int part = 0; part < vectors; part++) sums[part] *= shrink;
        weight *= shrink;
        for (long i = 0; i < KEYS; i += LANES) {
            Vector some = exponential(load(logits, i, FP32) - highest);
            memcpy(logits + i, &some, sizeof some);
            weight += total(some);
        }
        most = highest;
        for (long i = 0; i < count; i++) {
            Vector share = spread(logits[i]);
            for (int part = 0; part < vectors; part++)
                sums[part] = multiply_add(share, load(w->v_cache, at[i] + part * LANES, type), sums[part]);
        }
    }
    float inverse = weight > 0.0f ? 1.0f / weight : weight == 0.0f ? 0.0f : weight;
    for (int part = 0; part < vectors; part++) store(w->out, at_q + part * LANES, type, sums[part] * inverse);
}

static void one_part(const void *work, long part) {
    const struct Work *w = work;
    long row = part / w->q_heads, head = part % w->q_heads, length = w->lengths[row], first = 0;
    if (w->window && length > w->window) first = length - w->window;
    int vectors = (int)(w->dim / LANES);
    // Constants for what most models have, so that a head stays in registers.
    if (w->type == BF16 && vectors == 4) one_head(w, row, head, first, length, 4, BF16);
    else if (w->type == BF16 && vectors == 8) one_head(w, row, head, first, length, 8, BF16);
    else if (w->type == FP32 && vectors == 4) one_head(w, row, head, first, length, 4, FP32);
    else if (w->type == FP32 && vectors == 8) one_head(w, row, head, first, length, 8, FP32);
    else one_head(w, row, head, first, length, vectors, w->type);
}

// Each head of each of the rows; D is at most 256. Threads share them.
void stoker_attention_decode(const struct Work *work) {
    pool_run(one_part, work, work->rows * work->q_heads, work->threads);
}
