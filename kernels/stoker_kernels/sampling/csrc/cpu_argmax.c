// The id of each row's highest logit.
//
// Shapes: logits [rows, columns] contiguous, of one type; tokens [rows].
// Invariants: the lowest of equals; NaN counts as -inf, and +inf as 3e38, as the oracle of sampling has it; a row depends on
// itself alone.
#include "cpu_floats.h"

// Vectors at a time, so that a maximum does not wait for the one before.
#define AT_ONCE 4

INLINE Vector finite(Vector values) {
    const Vector lowest = spread(-__builtin_inff()), highest = spread(3e38f);
    Words nan = (Words)(values != values), above = (Words)(values == -lowest);
    return (Vector)(((Words)lowest & nan) | ((Words)highest & above) | ((Words)values & ~(nan | above)));
}

INLINE Vector greater(Vector a, Vector b) {
    Words first = (Words)(a > b);
    return (Vector)(((Words)a & first) | ((Words)b & ~first));
}

INLINE float last_ones(const void *row, long at, int type) {
    Vector one = {0};
    memcpy(&one, (const char *)row + at * WIDTH[type], (size_t)WIDTH[type]);
    return finite(load(&one, 0, type))[0];
}

INLINE int32_t row_argmax(const void *row, long columns, int type) {
    Vector most[AT_ONCE];
    long whole = columns - columns % LANES, at = 0;
    for (int part = 0; part < AT_ONCE; part++) most[part] = spread(-__builtin_inff());
    for (; at + AT_ONCE * LANES <= whole; at += AT_ONCE * LANES)
        for (int part = 0; part < AT_ONCE; part++)
            most[part] = greater(finite(load(row, at + part * LANES, type)), most[part]);
    for (; at < whole; at += LANES) most[0] = greater(finite(load(row, at, type)), most[0]);
    for (int part = 1; part < AT_ONCE; part++) most[0] = greater(most[part], most[0]);
    float best = -__builtin_inff();
    for (int lane = 0; lane < LANES; lane++) best = most[0][lane] > best ? most[0][lane] : best;
    for (at = whole; at < columns; at++) {
        float value = last_ones(row, at, type);
        best = value > best ? value : best;
    }
    // Then the first that is as high.
    for (at = 0; at < whole; at += LANES) {
        Integers equal = finite(load(row, at, type)) == best;
        int found = 0;
        for (int lane = 0; lane < LANES; lane++) found |= equal[lane];
        if (!found) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (equal[lane]) return (int32_t)(at + lane);
    }
    for (; at < columns; at++)
        if (last_ones(row, at, type) == best) return (int32_t)at;
    return 0;
}

struct Work {
    const void *logits;
    int32_t *tokens;
    long rows, columns;
    int type;
};

void stoker_argmax(const struct Work *w) {
    for (long row = 0; row < w->rows; row++) {
        const void *mine = (const char *)w->logits + row * w->columns * WIDTH[w->type];
        w->tokens[row] = w->type == BF16 ? row_argmax(mine, w->columns, BF16) : row_argmax(mine, w->columns, FP32);
    }
}
