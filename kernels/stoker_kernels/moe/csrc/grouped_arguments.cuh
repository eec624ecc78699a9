// What the kernels of experts for many tokens are given, and how they cut it: see sm90_grouped_experts.cuh.
#pragma once
#include "ptx.cuh"
#include "sm90_chunk.cuh"

namespace stoker {

constexpr int GROUPED_LAG = 2;  // k blocks whose rows of x may be on their way; at most stages - 2

enum class GroupedKind { BF16, CHANNEL, BLOCK };

// A CTA of `GROUPS` warpgroups that multiply, 64 tokens of a tile each, and one that brings the operands.
template <int GROUPS>
struct GroupedShape {
  static constexpr int TOKENS = 64 * GROUPS, CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
  static constexpr int CONSUMER_REGISTERS = GROUPS == 2 ? 232 : 160, PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32;
};

struct GroupedArguments {
  __nv_bfloat16* out;          // gate-up: [pairs, n] in the plan's order; down: [pairs, n], each row at its pair's place
  const unsigned char* x;      // gate-up: [tokens], rows ld_x bytes apart; down reads rows by a map
  const __nv_bfloat16* bias;   // [experts, rows], or null
  const float* w_scale;        // of e4m3, [experts, rows] or of blocks as `ExpertWeights` has them
  const float* x_scale;        // [rows of x], of e4m3
  const int* order;            // [pairs]
  const int* tiles;            // [num_tiles, 3]: expert, first and end of its places in `order`
  float limit, slope;          // of the clamped activation
  int clamped, num_tiles, experts, top_k;
  int n, rows;                 // columns of the result; rows of an expert's weight, of gate and of up together
  int row_blocks, k_blocks, stages;
  int x_bytes, ld_x;           // of a row of x
};

template <GroupedKind kind>
struct GroupedElement;
template <>
struct GroupedElement<GroupedKind::BF16> {
  using type = __nv_bfloat16;
};
template <>
struct GroupedElement<GroupedKind::CHANNEL> {
  using type = e4m3;
};
template <>
struct GroupedElement<GroupedKind::BLOCK> {
  using type = e4m3;
};

}  // namespace stoker
