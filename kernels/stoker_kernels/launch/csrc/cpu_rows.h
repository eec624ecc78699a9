// Rows side by side in fp32, for products by any processor's vectors.
#pragma once
#include <stdint.h>

#include "cpu_floats.h"

// Rows at a time, and tokens whose sums stay in registers then: of 32 of 64 bytes, or of 16 of 32.
#ifdef __AVX512F__
#define ROWS 16
#define MOST_TOKENS 8
#else
#define ROWS 8
#define MOST_TOKENS 4
#endif

typedef float Rows __attribute__((vector_size(4 * ROWS)));
typedef uint32_t RowWords __attribute__((vector_size(4 * ROWS)));
typedef int32_t RowCodes __attribute__((vector_size(4 * ROWS)));

INLINE Rows all(float value) { return (Rows){0} + value; }

INLINE Rows add_product(Rows a, Rows b, Rows sum) {
    for (int row = 0; row < ROWS; row++) sum[row] = __builtin_fmaf(a[row], b[row], sum[row]);
    return sum;
}

// The levels of half codes.
INLINE Rows level_of(const Rows *levels, RowCodes code) {
#if ROWS == 16
    return __builtin_shuffle(levels[0], code);
#else
    return __builtin_shuffle(levels[0], levels[1], code);
#endif
}
