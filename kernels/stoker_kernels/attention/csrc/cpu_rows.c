// Attention on a CPU, a query token and head by itself: all scores, their softmax, then the values, each sum over the
// keys in their order.
//
// Shapes: q and out [tokens, heads, dim] fp32, k and v [kv_heads, keys, dim] fp32, sinks and slopes [heads] fp32 or
// null; dim is a multiple of 16. `block` 0: all keys are seen; else those of BlockPattern of inputs.py. The tokens are the last ones of the keys.
// Invariants: products and sums are rounded one by one (compile with -ffp-contract=off), so a token's bits depend on
// its query and on the keys up to its own position; a score is computed in fp32, its exponential in fp64.
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define MOST_DIM 1024
#define MOST_THREADS 64

typedef float Vector __attribute__((vector_size(4 * LANES)));

struct Work {
    const float *q, *k, *v, *sinks, *slopes;
    float *out, *scores;
    long tokens, heads, kv_heads, keys, dim, window, block, local, stride, step, first_head, first, last;
    float scale, softcap;
};

// e^x for x <= 0: 2^n · e^r with |r| <= ln 2 / 2, of which the eleventh power's share is below fp32's last bit.
static inline float exponential(float x) {
    if (!(x > -103.0f)) return x != x ? x : 0.0f;
    double scaled = (double)x * 1.4426950408889634;
    int64_t n = (int64_t)(scaled - 0.5);
    double r = (double)x - (double)n * 0.6931471805599453, sum = 1.0;
    for (int i = 11; i; i--) sum = 1.0 + sum * r / (double)i;
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return (float)(sum * power);
}

// cap · tanh(x / cap), by an exponential that cannot overflow.
static inline float capped(float x, float cap) {
    float e = exponential(-2.0f * fabsf(x / cap)), t = cap * ((1.0f - e) / (1.0f + e));
    return x < 0 ? -t : t;
}

static inline float dot(const float *a, const float *b, long dim) {
    Vector sum = {0};
    for (long d = 0; d < dim; d += LANES) {
        Vector x, y;
        memcpy(&x, a + d, sizeof x);
        memcpy(&y, b + d, sizeof y);
        sum += x * y;
    }
    float lanes[LANES];
    memcpy(lanes, &sum, sizeof sum);
    for (int wide = LANES / 2; wide; wide /= 2)
        for (int lane = 0; lane < wide; lane++) lanes[lane] += lanes[lane + wide];
    return lanes[0];
}

// Whether a head sees a key from a position.
static inline int sees(const struct Work *w, long head, long position, long key) {
    long seen = key / w->block;
    return position / w->block - seen < w->local || (seen + 1 + (head + w->first_head) * w->step) % w->stride == 0;
}

// One token and head.
static void attend(const struct Work *w, long token, long head, float *scores) {
    long kv = head / (w->heads / w->kv_heads), end = w->keys - w->tokens + token + 1;
    long begin = w->window > 0 && end > w->window ? end - w->window : 0;
    const float *q = w->q + (token * w->heads + head) * w->dim;
    const float *k = w->k + kv * w->keys * w->dim, *v = w->v + kv * w->keys * w->dim;
    float most = w->sinks ? w->sinks[head] : -INFINITY, total = 0.0f;
    for (long j = begin; j < end; j++) {
        if (w->block && !sees(w, head, end - 1, j)) {
            scores[j - begin] = -INFINITY;
            continue;
        }
        float score = dot(q, k + j * w->dim, w->dim) * w->scale;
        if (w->softcap > 0.0f) score = capped(score, w->softcap);
        if (w->slopes) score += w->slopes[head] * (float)(j - end + 1);
        scores[j - begin] = score;
        if (score > most) most = score;
    }
    float sums[MOST_DIM];
    memset(sums, 0, 4 * w->dim);
    if (w->sinks) total = exponential(w->sinks[head] - most);
    for (long j = begin; j < end; j++) {
        if (scores[j - begin] == -INFINITY) continue;
        float weight = exponential(scores[j - begin] - most);
        const float *value = v + j * w->dim;
        total += weight;
        for (long d = 0; d < w->dim; d++) sums[d] += weight * value[d];
    }
    float *out = w->out + (token * w->heads + head) * w->dim;
    for (long d = 0; d < w->dim; d++) out[d] = sums[d] / total;
}

static void *part(void *work) {
    const struct Work *w = work;
    for (long at = w->first; at < w->last; at++) attend(w, at / w->heads, at % w->heads, w->scores);
    return 0;
}

// By up to `threads` threads; 0 where there is no memory for scores, or `dim` is too large.
int stoker_attend_rows(const float *q, const float *k, const float *v, const float *sinks, const float *slopes,
                       float *out, long tokens, long heads, long kv_heads, long keys, long dim, long window, long block,
                       long local, long stride, long step, long first_head, float scale, float softcap, int threads) {
    struct Work works[MOST_THREADS];
    pthread_t helpers[MOST_THREADS];
    int made[MOST_THREADS] = {0};
    long all = tokens * heads;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1 || all < threads) threads = 1;
    float *scores = malloc((size_t)threads * keys * sizeof *scores);
    if (!scores || dim > MOST_DIM || dim % LANES) {
        free(scores);
        return 0;
    }
    for (int t = 0; t < threads; t++)
        works[t] = (struct Work){q, k, v, sinks, slopes, out, scores + t * keys, tokens, heads, kv_heads, keys, dim,
                                 window, block, local, stride, step, first_head,
                                 all * t / threads, all * (t + 1) / threads, scale, softcap};
    // Where no thread can be had, its part is computed here.
    for (int t = 1; t < threads; t++) made[t] = pthread_create(&helpers[t], 0, part, &works[t]) == 0;
    part(&works[0]);
    for (int t = 1; t < threads; t++) {
        if (made[t]) pthread_join(helpers[t], 0);
        else part(&works[t]);
    }
    free(scores);
    return 1;
}
