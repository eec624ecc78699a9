// What the kernels of experts for few tokens are given, and how they cut it: see sm90_few_experts.cuh.
#pragma once
#include "ptx.cuh"

namespace stoker {

constexpr int FEW_WARPS = 8, FEW_THREADS = 32 * FEW_WARPS;
constexpr int FEW_ROWS = 16;            // of the weight in a stage
constexpr int FEW_BOX_BYTES = 2048;     // 16 rows of 128 bytes
constexpr int FEW_BOXES = 2;            // of a stage
constexpr int FEW_STAGE_BYTES = FEW_BOXES * FEW_BOX_BYTES;
constexpr int FEW_STAGES = 2 * FEW_WARPS, FEW_RING_BYTES = FEW_STAGES * FEW_STAGE_BYTES;
constexpr int FEW_BARRIER_BYTES = 256;
constexpr int FEW_PITCH = 20;           // floats from one token's sums of 16 rows to the next one's
constexpr int FEW_MOST_EXPERTS = 256;   // that a warp chooses from
constexpr float FEW_E4M3_UNIT = 1.0f / 448.0f, FEW_LEAST_SCALE = 1e-12f;

enum class FewKind { BF16, CHANNEL, BLOCK };

struct FewArguments {
  uint16_t* out;            // gate-up: [pairs, rows] in the plan's order; down: [tokens, rows]
  const uint16_t* x;        // gate-up: [tokens, ld_x]; down: [pairs, columns]
  const float* scale;       // of channels [experts, (2 ·) rows] or others, as `ExpertWeights` has them
  const uint16_t* bias;     // [experts, (2 ·) rows], or null
  const int* order;         // [pairs]; this and the next three: null where these kernels choose
  const int* tiles;         // [num_tiles, 3]
  const int* ids;           // [tokens, top_k]
  const float* weights;     // [tokens, top_k]
  const uint16_t* logits;   // [tokens, ld_logits], where they do, or null
  const float* correction;  // [experts], added to the scores for the choice alone, or null
  const int64_t* slots;     // [tokens], below 0 for padding, which gets no expert; or null
  int* counts;              // [experts], set to the tokens of each by down; or null
  const uint16_t* shared;   // [tokens, ld_shared], or null
  const uint16_t* shared_gate;  // [tokens], or null
  float limit, slope;       // of the clamped activation
  int clamped, tokens, top_k, num_tiles;
  int rows, columns;        // of an expert's weight; rows of gate or up alone
  int tile_rows;            // of a stage: 8 of gate and of up, or up to 16 of down
  int row_tiles, chunks;    // stages that an expert's rows and columns make
  int boxes;                // of 128 bytes that a row makes
  int whole;                // of gate-up, up to eight tokens: a warp takes all columns of its rows
  int ld_x, ld_shared;
  int experts, ld_logits;   // this and what follows: of a choice
  int groups, group_size, top_groups;
  int sigmoid, renormalize, top2;
  float factor;             // of weights
};

// How a kind lies in the ring.
template <FewKind kind>
struct FewLayout {
  static constexpr bool quantized = kind != FewKind::BF16;
  static constexpr int BOX_COLUMNS = quantized ? 128 : 64, COLUMNS = FEW_BOXES * BOX_COLUMNS;
};

}  // namespace stoker
