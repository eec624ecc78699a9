// What the kernels of experts for many tokens are given, and how they cut it: see sm90_grouped_experts.cuh.
#pragma once
#include "ptx.cuh"
#include "sm90_chunk.cuh"

namespace stoker {

constexpr int GROUPED_GROUPS = 2;                    // of consumers, 64 tokens each
constexpr int GROUPED_TOKENS = 64 * GROUPED_GROUPS;  // of a CTA's tile
constexpr int GROUPED_CONSUMERS = 128 * GROUPED_GROUPS, GROUPED_PRODUCERS = 128;
constexpr int GROUPED_THREADS = GROUPED_CONSUMERS + GROUPED_PRODUCERS;
constexpr int GROUPED_ROWS = 256;  // of the weight in a tile

enum class GroupedKind { BF16, CHANNEL, BLOCK };

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
  int first_expert;            // of these `experts`: w, bias and scales begin with it
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
