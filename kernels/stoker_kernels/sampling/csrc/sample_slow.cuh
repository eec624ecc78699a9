// The same bound by bisection over all values, for rows whose odd values find no room: 32 passes over shared memory a
// filter, whatever the row holds. Every CTA of the cluster takes part and comes to the same result.
#pragma once
#include "sample_state.cuh"

namespace stoker {

// Integers in the order of the values; −0 counts as 0.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(added(value, 0.0f));
  return static_cast<int>(bits) < 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of_key(uint32_t key) {
  return __uint_as_float(static_cast<int>(key) < 0 ? key & 0x7FFFFFFF : ~key);
}

template <bool adjust>
struct SlowSearch {
  SampleShared& s;
  const Values<adjust> values;
  const int vectors, ids, rank, ctas;
  int round = 0;

  __device__ __forceinline__ float peak() {
    float highest = LOWEST;
    for (int i = thread_id(); i < vectors; i += SAMPLE_THREADS) {
      float v[VECTOR];
      values.load(i, v);
      for (int j = 0; j < VECTOR; ++j) highest = fmaxf(highest, v[j]);
    }
    highest = block_max(s, highest);
    if (thread_id() == 0) s.peak = highest;
    cluster_barrier();
    for (int cta = 0; cta < ctas; ++cta) highest = fmaxf(highest, __uint_as_float(load_cluster_4(there(&s.peak, cta))));
    return highest;
  }

  // Count and mass of the row's values that are not below `bound`.
  __device__ __forceinline__ Tally at_least(float bound, const Scale& scale) {
    Tally mine{0, 0};
    for (int i = thread_id(); i < vectors; i += SAMPLE_THREADS) {
      float v[VECTOR];
      values.load(i, v);
      for (int j = 0; j < VECTOR; ++j) {
        if (v[j] >= bound && i * VECTOR + j < ids) ++mine.count, mine.mass += scale.weight(v[j]);
      }
    }
    mine = {block_sum(s, mine.count), block_sum(s, mine.mass)};
    Tally* room = &s.partial[round++ & 1][0];
    if (thread_id() < ctas) {
      store_cluster_8(there(&room[rank].count, thread_id()), mine.count);
      store_cluster_8(there(&room[rank].mass, thread_id()), mine.mass);
    }
    cluster_barrier();
    Tally all{0, 0};
    for (int cta = 0; cta < ctas; ++cta) all.count += room[cta].count, all.mass += room[cta].mass;
    return all;
  }

  // The highest value that is not below `lowest` and at which `target` is reached; `total` becomes the mass from there.
  __device__ __forceinline__ float reach(const Scale& scale, bool by_mass, uint64_t target, float lowest, uint64_t& total) {
    uint32_t low = key_of(lowest), high = key_of(scale.peak) + 1;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const Tally all = at_least(value_of_key(middle), scale);
      if ((by_mass ? all.mass : all.count) >= target) {
        low = middle;
        total = all.mass;
      } else {
        high = middle;
      }
    }
    return value_of_key(low);
  }

  __device__ __forceinline__ Decision decide(float temperature, float min_p, int top_k, float top_p) {
    const float highest = peak();
    if (highest == LOWEST) return {highest, LOWEST, BEST};
    const Scale scale(highest, temperature, min_p);
    float bound = LOWEST;
    uint64_t total = at_least(LOWEST, scale).mass;
    if (top_k > 0) bound = reach(scale, false, static_cast<uint64_t>(top_k), bound, total);
    if (top_p < 1.0f) {
      const int64_t share = truncated_product(static_cast<double>(top_p), static_cast<double>(static_cast<int64_t>(total)));
      bound = reach(scale, true, share < 1 ? 1 : static_cast<uint64_t>(share), bound, total);
    }
    return {highest, bound, DRAW};
  }
};

}  // namespace stoker
