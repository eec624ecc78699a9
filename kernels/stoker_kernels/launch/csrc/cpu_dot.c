// y[m, n] = sum over k of x[m, k] · weight[n, k] on a CPU, where each sum is taken in the same order whatever else is
// computed: 16 lanes, each over every 16th k in turn, then the lanes by halves.
//
// Shapes: weight [rows, columns] fp32 or bf16, x [tokens, stride] fp32, y [tokens, y_stride] fp32. x has zeros from
// `columns` on, up to a multiple of 16.
// Invariants: products and sums are rounded one by one (compile with -ffp-contract=off), so that how many rows are
// computed together, and by which thread, changes no bit; nothing is read beyond a row of the weight.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define ROWS 4
#define MOST_TOKENS 16
#define MOST_THREADS 64

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Work {
    const void *weight;
    int is_bf16;
    long first, last, columns, tokens, x_stride, y_stride;
    const float *x;
    float *y;
};

static inline Vector widened(Halves halves) {
    Words words = __builtin_convertvector(halves, Words) << 16;
    Vector values;
    memcpy(&values, &words, sizeof values);
    return values;
}

// 16 values of a row from k on; zeros behind its end.
static inline Vector weights_at(const void *row, int is_bf16, long k, long columns) {
    if (is_bf16) {
        Halves halves = {0};
        if (k + LANES <= columns) memcpy(&halves, (const uint16_t *)row + k, sizeof halves);
        else memcpy(&halves, (const uint16_t *)row + k, 2 * (columns - k));
        return widened(halves);
    }
    Vector values = {0};
    if (k + LANES <= columns) memcpy(&values, (const float *)row + k, sizeof values);
    else memcpy(&values, (const float *)row + k, 4 * (columns - k));
    return values;
}

static float total(Vector sum) {
    float lanes[LANES];
    memcpy(lanes, &sum, sizeof sum);
    for (int wide = LANES / 2; wide; wide /= 2)
        for (int lane = 0; lane < wide; lane++) lanes[lane] += lanes[lane + wide];
    return lanes[0];
}

// `rows` rows of the weight against `tokens` tokens, both constants.
static inline __attribute__((always_inline)) void tile(const struct Work *w, long n, long token, int rows, int tokens,
                                                       int is_bf16) {
    Vector sums[ROWS][ROWS];
    memset(sums, 0, sizeof sums);
    long row_bytes = w->columns * (is_bf16 ? 2 : 4);
    for (long k = 0; k < w->columns; k += LANES) {
        Vector x[ROWS];
        for (int m = 0; m < tokens; m++) memcpy(&x[m], w->x + (token + m) * w->x_stride + k, sizeof x[m]);
        for (int r = 0; r < rows; r++) {
            Vector values = weights_at((const char *)w->weight + (n + r) * row_bytes, is_bf16, k, w->columns);
            for (int m = 0; m < tokens; m++) sums[m][r] += x[m] * values;
        }
    }
    for (int m = 0; m < tokens; m++)
        for (int r = 0; r < rows; r++) w->y[(token + m) * w->y_stride + n + r] = total(sums[m][r]);
}

static inline __attribute__((always_inline)) void rows_by_tokens(const struct Work *w, long token, long count,
                                                                 int is_bf16) {
    long n = w->first;
    for (; n + ROWS <= w->last; n += ROWS) {
        long m = 0;
        for (; m + ROWS <= count; m += ROWS) tile(w, n, token + m, ROWS, ROWS, is_bf16);
        for (; m < count; m++) tile(w, n, token + m, ROWS, 1, is_bf16);
    }
    for (; n < w->last; n++)
        for (long m = 0; m < count; m++) tile(w, n, token + m, 1, 1, is_bf16);
}

static void *part(void *work) {
    const struct Work *w = work;
    for (long token = 0; token < w->tokens; token += MOST_TOKENS) {
        long left = w->tokens - token, count = left < MOST_TOKENS ? left : MOST_TOKENS;
        if (w->is_bf16) rows_by_tokens(w, token, count, 1);
        else rows_by_tokens(w, token, count, 0);
    }
    return 0;
}

// By up to `threads` threads, each with rows of the weight.
void stoker_dot_product(const void *weight, int is_bf16, long rows, long columns, const float *x, long x_stride,
                        long tokens, float *y, long y_stride, int threads) {
    struct Work works[MOST_THREADS];
    pthread_t helpers[MOST_THREADS];
    int made[MOST_THREADS] = {0};
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1 || rows < threads) threads = 1;
    for (int t = 0; t < threads; t++)
        works[t] = (struct Work){weight, is_bf16, rows * t / threads, rows * (t + 1) / threads, columns,
                                 tokens, x_stride, y_stride, x, y};
    // Where no thread can be had, its part is computed here.
    for (int t = 1; t < threads; t++) made[t] = pthread_create(&helpers[t], 0, part, &works[t]) == 0;
    part(&works[0]);
    for (int t = 1; t < threads; t++) {
        if (made[t]) pthread_join(helpers[t], 0);
        else part(&works[t]);
    }
}
