// Weights of few bits with scales of their own, sixteen rows side by side: what both products share of them.
//
// Codes lie as `lane_gemm/order.py` says: of sixteen rows and 32 columns there come `planes` times 256 bytes of half codes,
// in which a vector has two columns of each row side by side, and four pairs of columns in the four half bytes of its words.
// Scales lie [groups, rows], as files have them, so that those of neighbouring rows are a vector.
#pragma once
#include <stdint.h>

#include "cpu_floats.h"

#define GROUP 16
#define COLUMNS 32
#define PLANE 256

enum { INTEGERS = 0, FLOATS = 1 };
// Of scales; the order is that of SCALE_TYPES in product.py.
enum { SCALE_BF16 = 0, SCALE_FP32 = 1, SCALE_FP16 = 2, SCALE_E8M0 = 3, SCALE_E4M3 = 4 };

// y[m, n] = factor[n] · (sum over k of (code - zero)[n, k] · scale[n, k / group] · x[m, k]) + bias[n]. `zeros` are
// [groups, rows], or 0: the middle of all codes; `factors` and `bias` are fp32 [rows], or 0. `sums` is scratch
// [tokens, columns / 32]. `group` is a multiple of 32, or 16; `wide`: y is fp32; a part has `step` groups of 16 rows.
struct Work {
    const uint8_t *codes;
    const void *scales;
    const uint8_t *zeros;
    const float *factors, *bias;
    const void *x;
    float *sums;
    void *y;
    long rows, columns, tokens, group, step;
    int bits, numbers, scale_type, wide, threads;
};

// What a half code is worth. Twice the floats, so that all are integers; a scale is then halved.
static const short LOW[2][16] = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
                                 {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

// The scales of sixteen rows, from place `at` on.
INLINE Vector scales_of(const struct Work *w, long at) {
    if (w->scale_type <= SCALE_FP32) return load(w->scales, at, w->scale_type);
    if (w->scale_type == SCALE_FP16) {
        Halves halves;
        memcpy(&halves, (const uint16_t *)w->scales + at, sizeof halves);
        Words bits = __builtin_convertvector(halves, Words);
        // A product by 2^112 makes those without a leading one right, too.
        Vector value = (Vector)((bits & 0x7fff) << 13) * 0x1p112f;
        Words beyond = (Words)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
        return (Vector)((Words)value | beyond | (bits & 0x8000) << 16);
    }
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    memcpy(&bytes, (const uint8_t *)w->scales + at, sizeof bytes);
    Words bits = __builtin_convertvector(bytes, Words);
    if (w->scale_type == SCALE_E4M3) {
        Vector value = (Vector)((bits & 0x7f) << 20) * (0x1p120f / 2);
        Words nan = (Words)((bits & 0x7f) == 0x7f) & 0x7fc00000;
        return (Vector)((Words)value | nan | (bits & 0x80) << 24);
    }
    // 2^(bits - 127) / 2, the two least of which have no leading one; 255 is no number.
    Words power = (bits - 1) << 23, least = (Words)(bits < 2), nan = (Words)(bits == 255) & 0x7fc00000;
    return (Vector)((power & ~least) | (least & (Words)(0x200000u << (bits & 1))) | nan);
}

// What zero points add for each unit of the sum of x: scale · (middle - zero).
INLINE Vector offsets_of(const struct Work *w, long at, Vector scales) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    memcpy(&bytes, w->zeros + at, sizeof bytes);
    Integers zero = __builtin_convertvector(bytes, Integers);
    return scales * __builtin_convertvector((w->bits == 4 ? 8 : 128) - zero, Vector);
}
