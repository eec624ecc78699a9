// SwiGLU: silu(gate) · up of rows that hold gate, then up.
//
// Shapes: x [rows, 2 · columns], out [rows, columns], contiguous, of one type; columns are a multiple of 16.
// Invariants: arithmetic is fp32 with one rounding.
#include "cpu_floats.h"

INLINE void rows_of(const void *x, long rows, long columns, void *out, int type) {
    for (long row = 0; row < rows; row++)
        for (long at = 0; at < columns; at += LANES) {
            Vector gate = load(x, 2 * row * columns + at, type), up = load(x, (2 * row + 1) * columns + at, type);
            store(out, row * columns + at, type, gate / (1.0f + exponential(-gate)) * up);
        }
}

struct Work {
    const void *x;
    void *out;
    long rows, columns;
    int type;
};

void stoker_silu_and_mul(const struct Work *w) {
    if (w->type == BF16) rows_of(w->x, w->rows, w->columns, w->out, BF16);
    else rows_of(w->x, w->rows, w->columns, w->out, FP32);
}
