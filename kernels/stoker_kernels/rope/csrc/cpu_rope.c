// Norm of the heads of q and k where there is one, rotation of their halves, k and v into their pages.
//
// Shapes: qkv [tokens, (Hq + 2 · Hkv) · D] and q [tokens, Hq · D] of one type with the caches [pages, Hkv, page, D];
// cos_sin [positions, 2 · half] fp32, all cosines first; positions int32, places int64 (−1: nothing is written).
// Invariants: D and half are multiples of 16; arithmetic is fp32 with one rounding. Addresses are the caller's to check.
#include <math.h>

#include "cpu_floats.h"

struct Work {
    const void *qkv;
    const int32_t *positions;
    const int64_t *places;
    const float *cos_sin;
    void *k_cache, *v_cache, *q;
    const void *q_norm, *k_norm;  // [D] each, or 0
    long tokens, q_heads, kv_heads, dim, half, page;
    int type, norm_type;
    float eps;
};

INLINE void turn(const void *head, const void *norm, const float *table, const struct Work *s, void *out, int type) {
    float scale = 1.0f;
    if (norm) {
        Vector squares = {0};
        for (long at = 0; at < s->dim; at += LANES) {
            Vector value = load(head, at, type);
            squares = multiply_add(value, value, squares);
        }
        scale = 1.0f / sqrtf(total(squares) / (float)s->dim + s->eps);
    }
    for (long at = 0; at < s->dim; at += LANES) {
        if (at >= s->half && at < 2 * s->half) continue;
        Vector first = load(head, at, type);
        if (norm) first = first * scale * load(norm, at, s->norm_type);
        if (at >= s->half) {  // beyond what turns
            store(out, at, type, first);
            continue;
        }
        Vector second = load(head, at + s->half, type);
        if (norm) second = second * scale * load(norm, at + s->half, s->norm_type);
        Vector cosine = load(table, at, FP32), sine = load(table, at + s->half, FP32);
        store(out, at, type, first * cosine - second * sine);
        store(out, at + s->half, type, second * cosine + first * sine);
    }
}

INLINE void tokens_of(const struct Work *s, int type) {
    long head = s->dim * WIDTH[type], all = s->q_heads + 2 * s->kv_heads;
    for (long token = 0; token < s->tokens; token++) {
        const char *mine = (const char *)s->qkv + token * all * head;
        const float *table = s->cos_sin + (long)s->positions[token] * 2 * s->half;
        for (long h = 0; h < s->q_heads; h++)
            turn(mine + h * head, s->q_norm, table, s, (char *)s->q + (token * s->q_heads + h) * head, type);
        if (s->places[token] < 0) continue;
        long page = s->places[token] / s->page, row = s->places[token] % s->page;
        for (long h = 0; h < s->kv_heads; h++) {
            long at = ((page * s->kv_heads + h) * s->page + row) * head;
            turn(mine + (s->q_heads + h) * head, s->k_norm, table, s, (char *)s->k_cache + at, type);
            memcpy((char *)s->v_cache + at, mine + (s->q_heads + s->kv_heads + h) * head, (size_t)head);
        }
    }
}

void stoker_rope(const struct Work *s) {
    if (s->type == BF16) tokens_of(s, BF16);
    else tokens_of(s, FP32);
}
