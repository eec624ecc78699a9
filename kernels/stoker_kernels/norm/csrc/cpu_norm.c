// RMS norm of rows, alone or behind the addition to a residual stream.
//
// Shapes: x, residual, out [rows, columns] contiguous, of one type; weight [columns] of its own type.
// Invariants: columns are a multiple of 16; arithmetic is fp32 with one rounding; the sum is rounded before it is normed;
// out may be x; each row depends on itself alone.
#include <math.h>

#include "cpu_floats.h"

INLINE void norm_row(const void *x, void *residual, const void *weight, long columns, float eps, float multiplier,
                     void *out, int type, int weight_type) {
    const void *normed = residual ? residual : x;
    Vector squares = {0};
    for (long at = 0; at < columns; at += LANES) {
        Vector value = load(normed, at, type);
        if (residual) {
            value = as_stored(value + load(x, at, type) * multiplier, type);
            store(residual, at, type, value);
        }
        squares = multiply_add(value, value, squares);
    }
    float scale = 1.0f / sqrtf(total(squares) / (float)columns + eps);
    for (long at = 0; at < columns; at += LANES)
        store(out, at, type, load(normed, at, type) * scale * load(weight, at, weight_type));
}

struct Work {
    const void *x, *weight;
    void *residual, *out;  // residual may be 0: then x is normed by itself
    long rows, columns;
    float eps, multiplier;
    int type, weight_type;
};

void stoker_rms_norm(const struct Work *w) {
    for (long row = 0; row < w->rows; row++) {
        long at = row * w->columns * WIDTH[w->type];
        void *beside = w->residual ? (char *)w->residual + at : 0, *out = (char *)w->out + at;
        const char *mine = (const char *)w->x + at;
        // The types are constants in each call, so that no loop asks for them.
        if (w->type == BF16 && w->weight_type == BF16)
            norm_row(mine, beside, w->weight, w->columns, w->eps, w->multiplier, out, BF16, BF16);
        else norm_row(mine, beside, w->weight, w->columns, w->eps, w->multiplier, out, w->type, w->weight_type);
    }
}
