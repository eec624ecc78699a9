// A row of logits in the shared memory of a cluster: where values lie, which bin a value falls in, what it weighs.
//
// Weights are the integers of reference.py: every floating-point step below is one rounded operation in its order.
#pragma once
#include "sample_ptx.cuh"

namespace stoker {

constexpr int SAMPLE_THREADS = 512, SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr int VECTOR = 8;      // values that a thread takes at a time
constexpr int MOST_CTAS = 16;  // of a cluster
constexpr float LOWEST = -INFINITY;

// ---- bins ----------------------------------------------------------------------------------------------------------
// A bin holds the values that share the upper 16 bits of fp32, highest values first: bf16 logits have one value a bin. Of
// each sign those from 2⁻¹² to 2⁸ have bins of their own, the rest share two, and zero has one. A value that is its bin's
// first is `regular`, and its count says all; the others, `odd` ones, are listed besides.

constexpr int FIRST_REGULAR = 115 << 7, REGULAR = 20 << 7;  // upper bits of 2⁻¹²; how many follow
constexpr int FARTHEST = REGULAR + 2, CENTER = FARTHEST;    // bins of one sign; the bin of zero
constexpr int GROUP = 12, GROUPS = 428, BINS = GROUP * GROUPS;  // bins are added up by groups, one a thread
static_assert(2 * FARTHEST + 1 <= BINS && GROUPS <= SAMPLE_THREADS && GROUP % 4 == 0);

__device__ __forceinline__ bool is_regular(uint32_t bits) {
  const uint32_t magnitude = bits >> 16 & 0x7FFF;
  return (bits & 0xFFFF) == 0 && (magnitude == 0 || magnitude - FIRST_REGULAR < static_cast<uint32_t>(REGULAR));
}
__device__ __forceinline__ int bin_of(uint32_t bits) {
  const int magnitude = static_cast<int>(bits >> 16 & 0x7FFF);
  int away = min(max(magnitude - (FIRST_REGULAR - 2), 1), FARTHEST);
  if ((bits & 0x7FFFFFFF) == 0) away = 0;
  return static_cast<int>(bits) < 0 ? CENTER + away : CENTER - away;
}
// The regular value of a bin that has one.
__device__ __forceinline__ float value_of(int bin) {
  const int from_center = CENTER - bin;
  if (from_center == 0) return 0.0f;
  const uint32_t magnitude = (from_center < 0 ? -from_center : from_center) - 2 + FIRST_REGULAR;
  return __uint_as_float(magnitude << 16 | (from_center < 0 ? 0x80000000u : 0u));
}

// ---- weights -------------------------------------------------------------------------------------------------------

struct Scale {
  float peak, factor, relevant;  // below `relevant` every weight is 0
  uint64_t least;

  __device__ __forceinline__ Scale(float peak, float temperature, float min_p)
      : peak(peak), factor(multiplied(divided(1.0f, temperature), 1.4426950408889634f)) {
    const int64_t bound = truncated_product(static_cast<double>(min_p), 1099511627776.0);
    least = bound < 1 ? 1 : static_cast<uint64_t>(bound);
    // 2⁴⁰ · 2⁻⁴² is less than 1 even if the mantissa is a little over 2; the rest is for the rounding of this line.
    relevant = peak - 42.0f / factor - fabsf(peak) * 0x1p-22f;
  }

  // 2⁴⁰ · 2^((value − peak) · factor), truncated; 0 where below `least`.
  __device__ __forceinline__ uint64_t weight(float value) const {
    const float exponent = fmaxf(multiplied(added(value, -peak), factor), -100.0f);
    const float shifted = floor_shifted(exponent);
    const float part = added(exponent, -added(shifted, -12582912.0f));
    float mantissa = added(multiplied(0.0018671444850042462f, part), 0.00901699997484684f);
    mantissa = added(multiplied(mantissa, part), 0.0557999350130558f);
    mantissa = added(multiplied(mantissa, part), 0.24016444385051727f);
    mantissa = added(multiplied(mantissa, part), 0.6931512951850891f);
    mantissa = added(multiplied(mantissa, part), 1.0f);
    // 0x4B400000 are the bits of 1.5 · 2²³; 167 is 40 and the bias of an exponent.
    const float scale = __uint_as_float((__float_as_uint(shifted) - 0x4B400000u + 167u) << 23);
    const uint64_t w = truncated(multiplied(mantissa, scale));
    return w >= least ? w : 0;
  }
};

// A point in [0, total): the high half of total times 64 bits of Philox 4x32-10 of (seed, position).
__device__ __forceinline__ uint64_t draw_point(uint32_t seed_low, uint32_t seed_high, uint32_t position, uint64_t total) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high_a = high_product(0xD2511F53u, c0), low_a = 0xD2511F53u * c0;
    const uint32_t high_b = high_product(0xCD9E8D57u, c2), low_b = 0xCD9E8D57u * c2;
    c0 = high_b ^ c1 ^ seed_low, c1 = low_b;
    c2 = high_a ^ c3 ^ seed_high, c3 = low_a;
    seed_low += 0x9E3779B9u, seed_high += 0xBB67AE85u;
  }
  return high_product_64(static_cast<uint64_t>(c1) << 32 | c0, total);
}

// ---- values --------------------------------------------------------------------------------------------------------

// The values of this CTA's part of the row, in shared memory in order of ids: bf16 as they came, or fp32 if adjusted.
template <bool adjust>
struct Values {
  unsigned char* data;

  __device__ __forceinline__ void load(int vector, float (&v)[VECTOR]) const {
    if constexpr (adjust) {
      const float4* from = reinterpret_cast<const float4*>(data) + 2 * vector;
      const float4 a = from[0], b = from[1];
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
      unpack(reinterpret_cast<const uint4*>(data)[vector], v);
    }
  }
  __device__ __forceinline__ void store(int vector, const float (&v)[VECTOR]) const {
    float4* to = reinterpret_cast<float4*>(data) + 2 * vector;
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
  __device__ __forceinline__ static void unpack(const uint4& x, float (&v)[VECTOR]) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
};

// Two bf16 without NaN, which becomes −inf, and without what exceeds 3e38, which becomes the largest number: the row has
// the same order and the same weights as with the reference's 3e38.
__device__ __forceinline__ uint32_t finite_half(uint32_t x) {
  if ((x & 0x7FFF) > 0x7F80) return 0xFF80;
  return x >= 0x7F62 && x <= 0x7F80 ? 0x7F7F : x;
}
__device__ __forceinline__ uint32_t finite_pair(uint32_t word) {
  // Nothing to do below 2¹²⁷: a carry out of either half says that one is not.
  if ((((word & 0x7FFF7FFFu) + 0x01000100u) & 0x80008000u) == 0) return word;
  return finite_half(word & 0xFFFF) | finite_half(word >> 16) << 16;
}

}  // namespace stoker
