// Vectors of sixteen fp32 numbers from and to bf16 or fp32 in memory, for kernels on CPUs of any kind.
//
// Invariants: rounding to bf16 is to nearest, ties to even, and NaN stays NaN.
#pragma once
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// Of what type the numbers in memory are.
enum { BF16 = 0, FP32 = 1 };
static const int WIDTH[] = {2, 4};

INLINE Vector load(const void *base, long at, int type) {
    Vector found;
    if (type == FP32) {
        memcpy(&found, (const float *)base + at, sizeof found);
        return found;
    }
    Halves halves;
    memcpy(&halves, (const uint16_t *)base + at, sizeof halves);
    return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

INLINE Halves rounded(Vector values) {
    Words bits = (Words)values, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    Words nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & nearest), Halves);
}

INLINE void store(void *base, long at, int type, Vector values) {
    if (type == FP32) {
        memcpy((float *)base + at, &values, sizeof values);
        return;
    }
    Halves halves = rounded(values);
    memcpy((uint16_t *)base + at, &halves, sizeof halves);
}

// What `store` leaves of the values.
INLINE Vector as_stored(Vector values, int type) {
    return type == FP32 ? values : (Vector)(__builtin_convertvector(rounded(values), Words) << 16);
}

INLINE Vector multiply_add(Vector a, Vector b, Vector sum) {
    for (int lane = 0; lane < LANES; lane++) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
    return sum;
}

INLINE Vector spread(float value) { return (Vector){0} + value; }

// Halves are added to each other, so that no lane passes through memory.
INLINE float total(Vector sum) {
    Eight eight = __builtin_shufflevector(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15);
    Four four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// e^x within 2 units of the last place; 0 below -87, e^88 above 88.
INLINE Vector exponential(Vector x) {
    const float shift = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
    Words low = (Words)(x < -87.0f), high = (Words)(x > 88.0f);
    x = (Vector)(((Words)x & ~high) | ((Words)spread(88.0f) & high));
    Vector rounding = multiply_add(x, spread(1.44269504f), spread(shift));
    Vector whole = rounding - shift;
    Vector rest = multiply_add(whole, spread(-0.693145752f), x);
    rest = multiply_add(whole, spread(-1.42860677e-6f), rest);
    Vector power = spread(1.0f / 720);
    power = multiply_add(power, rest, spread(1.0f / 120));
    power = multiply_add(power, rest, spread(1.0f / 24));
    power = multiply_add(power, rest, spread(1.0f / 6));
    power = multiply_add(power, rest, spread(0.5f));
    power = multiply_add(power, rest, spread(1.0f));
    power = multiply_add(power, rest, spread(1.0f));
    Words exponent = ((Words)rounding - 0x4b400000u) << 23;
    return (Vector)(((Words)power + exponent) & ~low);
}
