// The experts of a token from the router's logits, by one warp: what triton_route.py's kernel does for few tokens, where
// every CTA does it for itself instead of waiting for a kernel that does it for all.
//
// A lane has every 32nd expert. Numbers are compared as integers in the same order, of which 0 is no number's; the best one
// is found by a reduction of the warp, and of equals the first expert by another one. Loads go past L1, because down reads logits before its wait.
#pragma once
#include "few_arguments.cuh"

namespace stoker {

struct FewChoice {
  static constexpr int EACH = FEW_MOST_EXPERTS / 32;
  static constexpr unsigned ALL = 0xFFFFFFFFu, NONE = 0x007FFFFFu;  // every lane; the key of −inf

  const FewArguments& a;
  int* const ids;        // [pairs], of shared memory
  float* const weights;  // [pairs]
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ FewChoice(const FewArguments& arguments, int* chosen, float* weighed)
      : a(arguments), ids(chosen), weights(weighed) {}

  // Both zeros are equal.
  static __device__ __forceinline__ unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  static __device__ __forceinline__ float number_of(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
  }

  // Of one token, in the place of its pairs. In a rehearsal all logits are zero, and nothing is read.
  __device__ __forceinline__ void choose(int token, bool real, bool weigh) const {
    const uint16_t* from = a.logits + static_cast<int64_t>(token) * a.ld_logits;
    const int* slot = reinterpret_cast<const int*>(a.slots + token);
    const bool there = !real || a.slots == nullptr || load_int(slot + 1) >= 0;  // the half with the sign
    const bool corrected = a.correction != nullptr, by_logit = !a.sigmoid && !corrected;
    float worth[EACH];  // the logits, at first
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int expert = lane + 32 * j;
      worth[j] = expert >= a.experts ? -INFINITY : real ? bf16_low(load_half(from + expert)) : 0.0f;
    }
    float top = 0.0f, total = 1.0f;
    if (!a.sigmoid && (corrected || weigh)) add_up(worth, top, total);
    if (!by_logit) {  // one jump over code that need not be brought in
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int expert = lane + 32 * j;
        worth[j] = score(worth[j], top, total);
        if (corrected && expert < a.experts) worth[j] += a.correction[expert];
      }
    }
    unsigned keys[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) keys[j] = lane + 32 * j < a.experts ? key_of(worth[j]) : 0;
    if (a.groups > 1) keep_groups(keys);
    const int mine = take_best(keys, by_logit && a.groups == 1);
    float weight = 0.0f;
    if (weigh) {
      if (mine >= 0) weight = score(real ? bf16_low(load_half(from + mine)) : 0.0f, top, total);
      if (a.renormalize) weight = weight / (sum(weight) + 1e-20f);
    }
    if (mine < 0) return;
    ids[token * a.top_k + lane] = there ? mine : -1;
    weights[token * a.top_k + lane] = weight * a.factor;
  }

  __device__ __forceinline__ float score(float logit, float top, float total) const {
    return a.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - top) / total;
  }
  static __device__ __forceinline__ float sum(float x) {
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL, x, mask);
    return x;
  }
  static __device__ __forceinline__ unsigned greatest(const unsigned (&keys)[EACH]) {
    unsigned found = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) found = max(found, keys[j]);
    return __reduce_max_sync(ALL, found);
  }
  // The first expert that has a key.
  __device__ __forceinline__ unsigned first_with(const unsigned (&keys)[EACH], unsigned key) const {
    unsigned found = ALL;
#pragma unroll
    for (int j = EACH - 1; j >= 0; --j) found = keys[j] == key ? lane + 32 * j : found;
    return __reduce_min_sync(ALL, found);
  }

  // Of the softmax: the greatest logit, and the sum of all powers.
  __device__ __forceinline__ void add_up(const float (&logits)[EACH], float& top, float& total) const {
    unsigned found = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) found = max(found, key_of(logits[j]));
    top = number_of(__reduce_max_sync(ALL, found));
    float own = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; ++j) own += expf(logits[j] - top);
    total = sum(own);
  }

  // Lane k gets the k-th best; the others −1. Logits of 16 bits leave 16 for the expert, and one reduction does.
  __device__ __forceinline__ int take_best(unsigned (&keys)[EACH], bool halves) const {
    if (halves) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        if (keys[j] != 0) keys[j] = (keys[j] & 0xFFFF0000u) | (0xFFFFu - (lane + 32 * j));
      }
    }
    int mine = -1;
#pragma unroll 1
    for (int choice = 0; choice < a.top_k; ++choice) {
      const unsigned best = greatest(keys);
      const unsigned chosen = halves ? 0xFFFFu - (best & 0xFFFFu) : first_with(keys, best);
#pragma unroll
      for (int j = 0; j < EACH; ++j) keys[j] = chosen == lane + 32 * j ? 0 : keys[j];
      if (lane == choice) mine = static_cast<int>(chosen);
    }
    return mine;
  }

  // Experts outside of the best groups lose their keys. A lane has a group's worth: its best, or the sum of its two best.
  __device__ __forceinline__ void keep_groups(unsigned (&keys)[EACH]) const {
    unsigned worth = 0;
#pragma unroll 1
    for (int group = 0; group < a.groups; ++group) {
      unsigned inside[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) inside[j] = within(group, j) ? keys[j] : 0;
      const unsigned best = greatest(inside);
      float value = number_of(best);
      if (a.top2) {
        const unsigned first = first_with(inside, best);
#pragma unroll
        for (int j = 0; j < EACH; ++j) inside[j] = first == lane + 32 * j ? 0 : inside[j];
        value += number_of(greatest(inside));
      }
      if (lane == group) worth = key_of(value);
    }
    unsigned kept = 0;
#pragma unroll 1
    for (int i = 0; i < a.top_groups; ++i) {
      const unsigned best = __reduce_max_sync(ALL, worth);
      const int group = __ffs(__ballot_sync(ALL, worth == best)) - 1;
      kept |= 1u << group;
      if (lane == group) worth = 0;
    }
#pragma unroll 1
    for (int group = 0; group < a.groups; ++group) {
      if (kept >> group & 1) continue;
#pragma unroll
      for (int j = 0; j < EACH; ++j) keys[j] = within(group, j) ? NONE : keys[j];
    }
  }
  __device__ __forceinline__ bool within(int group, int j) const {
    return static_cast<unsigned>(lane + 32 * j - group * a.group_size) < static_cast<unsigned>(a.group_size);
  }
};

}  // namespace stoker
