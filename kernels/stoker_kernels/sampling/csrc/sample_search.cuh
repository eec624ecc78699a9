// The value of the last token that top-k and top-p keep, found by the first CTA of a cluster from all CTAs' bins.
//
// Counts of a bin's one value make its mass, the odd values are added one by one; the sums run over groups of bins, from
// the highest values down, and the group in which the target is reached is resolved value by value.
#pragma once
#include "sample_state.cuh"

namespace stoker {

constexpr int ODD_OF_A_THREAD = 8;  // odd values of a row, all CTAs', that a thread of the first CTA takes

struct Search {
  SampleShared& s;
  const int ctas;
  int num_odd = 0;
  float odd[ODD_OF_A_THREAD];

  // Takes the odd values from the CTAs' lists. False where a list has run over, or where there are too many.
  __device__ __forceinline__ bool take_odd() {
    const int lane = thread_id() % 32;
    const uint32_t mine = lane < ctas ? load_cluster_4(there(&s.num_odd, lane)) : 0;
    const int up_to = static_cast<int>(scan_warp(mine, lane));
    const bool fits = !__any_sync(0xFFFFFFFFu, mine > ODD);
    num_odd = __shfl_sync(0xFFFFFFFFu, up_to, 31);
    if (!fits || num_odd > ODD_OF_A_THREAD * SAMPLE_THREADS) return false;
#pragma unroll
    for (int i = 0; i < ODD_OF_A_THREAD; ++i) {
      if (i * SAMPLE_THREADS >= num_odd) break;  // the same in all threads
      int cta = 0, before = 0;
      for (int other = 0; other + 1 < ctas; ++other) {
        const int end = __shfl_sync(0xFFFFFFFFu, up_to, other);
        if (thread_id() + i * SAMPLE_THREADS >= end) cta = other + 1, before = end;
      }
      const int at = thread_id() + i * SAMPLE_THREADS - before;
      if (has_odd(i)) odd[i] = __uint_as_float(load_cluster_4(there(&s.odd[at], cta)));
    }
    return true;
  }
  __device__ __forceinline__ bool has_odd(int i) const { return thread_id() + i * SAMPLE_THREADS < num_odd; }

  template <typename Visit>
  __device__ __forceinline__ void each_odd(Visit visit) const {
#pragma unroll
    for (int i = 0; i < ODD_OF_A_THREAD; ++i) {
      if (has_odd(i)) visit(odd[i]);
    }
  }

  // Adds up all CTAs' bins of this thread's group, in place; the highest of their values.
  __device__ __forceinline__ float merge() const {
    constexpr int PIECES = GROUP / 4, AHEAD = 2;  // CTAs whose bins are under way together
    float highest = LOWEST;
    if (thread_id() < GROUPS) {
      uint4* const mine = reinterpret_cast<uint4*>(&s.bins[thread_id() * GROUP]);
      uint4 sum[PIECES];
#pragma unroll
      for (int i = 0; i < PIECES; ++i) sum[i] = mine[i];
      for (int first = 1; first < ctas; first += AHEAD) {
        uint4 x[AHEAD][PIECES];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
#pragma unroll
          for (int i = 0; i < PIECES; ++i) {
            x[j][i] = first + j < ctas ? load_cluster_16(there(mine + i, first + j)) : make_uint4(0, 0, 0, 0);
          }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
#pragma unroll
          for (int i = 0; i < PIECES; ++i) {
            sum[i].x += x[j][i].x, sum[i].y += x[j][i].y, sum[i].z += x[j][i].z, sum[i].w += x[j][i].w;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        mine[i] = sum[i];
        const uint32_t counts[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (counts[j] != 0) highest = fmaxf(highest, value_of(thread_id() * GROUP + 4 * i + j));
        }
      }
    }
    each_odd([&](float v) { highest = fmaxf(highest, v); });
    return block_max(s, highest);
  }

  // Count and mass from the highest group on, up to each one; the odd values included. Returns the mass of all.
  __device__ __forceinline__ uint64_t weigh(const Scale& scale) {
    if (thread_id() < GROUPS) {
      uint64_t mass = 0;
      uint32_t count = 0;
      for (int i = 0; i < GROUP; ++i) {
        const int bin = thread_id() * GROUP + i;
        const uint32_t n = s.bins[bin];
        if (n != 0) mass += n * scale.weight(value_of(bin));
        count += n;
      }
      s.group_mass[thread_id()] = mass;
      s.group_count[thread_id()] = count;
    }
    __syncthreads();
    each_odd([&](float v) {
      const int group = bin_of(__float_as_uint(v)) / GROUP;
      add_to(&s.group_mass[group], scale.weight(v));
      add_to(&s.group_count[group], 1u);
    });
    __syncthreads();
    const bool mine = thread_id() < GROUPS;
    const uint64_t count_to = scan_block(s, mine ? s.group_count[thread_id()] : 0);
    const uint64_t mass_to = scan_block(s, mine ? s.group_mass[thread_id()] : 0);
    if (mine) {
      s.group_count[thread_id()] = static_cast<uint32_t>(count_to);
      s.group_mass[thread_id()] = mass_to;
    }
    __syncthreads();
    return s.group_mass[GROUPS - 1];
  }

  // Finds the value at which the sum from the highest on reaches `target`. False where the sum of all stays below it, or
  // where the group has more values than there is room for, which `s.found` then says.
  __device__ __forceinline__ bool reach(const Scale& scale, bool by_mass, uint64_t target, float& bound) const {
    __syncthreads();  // what an earlier search left has been read
    if (thread_id() == 0) s.found = GROUPS, s.num_candidates = 0;
    __syncthreads();
    if (thread_id() < GROUPS) {
      const Tally before = thread_id() > 0 ? up_to(thread_id() - 1) : Tally{0, 0}, to = up_to(thread_id());
      if ((by_mass ? before.mass : before.count) < target && target <= (by_mass ? to.mass : to.count)) {
        s.found = thread_id();
        s.before = before;
      }
    }
    __syncthreads();
    const int group = static_cast<int>(s.found);
    if (group == GROUPS) return false;
    gather(scale, group);
    if (s.num_candidates > CANDIDATES) {
      __syncthreads();
      if (thread_id() == 0) s.found = GROUPS + 1;
      __syncthreads();
      return false;
    }
    bound = resolve(by_mass, target);
    return true;
  }

  // After `weigh`: what the groups from the highest to this one hold.
  __device__ __forceinline__ Tally up_to(int group) const { return {s.group_count[group], s.group_mass[group]}; }

  __device__ __forceinline__ void offer(float value, uint32_t count, const Scale& scale) const {
    const uint32_t at = add_to(&s.num_candidates, 1u);
    if (at >= CANDIDATES) return;
    s.candidate_value[at] = value;
    s.candidate_count[at] = count;
    s.candidate_weight[at] = count * scale.weight(value);
  }

  __device__ __forceinline__ void gather(const Scale& scale, int group) const {
    if (thread_id() < GROUP) {
      const int bin = group * GROUP + thread_id();
      if (s.bins[bin] != 0) offer(value_of(bin), s.bins[bin], scale);
    }
    each_odd([&](float v) {
      if (bin_of(__float_as_uint(v)) / GROUP == group) offer(v, 1, scale);
    });
    __syncthreads();
  }

  // Each candidate adds up those that are not below it: the highest that reaches the target is the last one kept.
  __device__ __forceinline__ float resolve(bool by_mass, uint64_t target) const {
    const int count = static_cast<int>(s.num_candidates);
    float mine = LOWEST;
    Tally to = s.before;
    if (thread_id() < count) {
      const float value = s.candidate_value[thread_id()];
      for (int i = 0; i < count; ++i) {
        if (s.candidate_value[i] >= value) to.count += s.candidate_count[i], to.mass += s.candidate_weight[i];
      }
      if ((by_mass ? to.mass : to.count) >= target) mine = value;
    }
    const float bound = block_max(s, mine);
    if (thread_id() < count && mine == bound) s.reached = to;  // who ties writes the same
    __syncthreads();
    return bound;
  }
};
static_assert(CANDIDATES <= SAMPLE_THREADS);

// Top-k, then top-p of what is left; `top_k` 0 is all. Every thread of the first CTA gets the decision.
__device__ __forceinline__ Decision decide(SampleShared& s, int ctas, float temperature, float min_p, int top_k, float top_p) {
  Search search{s, ctas};
  if (!search.take_odd()) return {0.0f, LOWEST, SLOW};
  const float peak = search.merge();
  if (peak == LOWEST) return {peak, LOWEST, BEST};
  const Scale scale(peak, temperature, min_p);
  uint64_t total = search.weigh(scale);
  float bound = LOWEST;
  if (top_k > 0) {
    if (search.reach(scale, false, static_cast<uint64_t>(top_k), bound)) {
      total = s.reached.mass;
    } else if (s.found > GROUPS) {
      return {peak, LOWEST, SLOW};
    }
  }
  if (top_p < 1.0f) {
    const int64_t share = truncated_product(static_cast<double>(top_p), static_cast<double>(static_cast<int64_t>(total)));
    if (!search.reach(scale, true, share < 1 ? 1 : static_cast<uint64_t>(share), bound) && s.found > GROUPS) {
      return {peak, LOWEST, SLOW};
    }
  }
  return {peak, bound, DRAW};
}

}  // namespace stoker
