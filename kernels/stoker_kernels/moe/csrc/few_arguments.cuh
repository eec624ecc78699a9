// What the kernels of experts for few tokens are given, and how they cut it: see sm90_few_experts.cuh.
#pragma once
#include "ptx.cuh"

namespace stoker {

constexpr int FEW_WARPS = 8, FEW_THREADS = 32 * FEW_WARPS;
constexpr int FEW_ROWS = 16;            // of the weight in a stage
constexpr int FEW_BOX_BYTES = 2048;     // 16 rows of 128 bytes
constexpr int FEW_BOXES = 2;            // of a stage
constexpr int FEW_STAGE_BYTES = FEW_BOXES * FEW_BOX_BYTES;
constexpr int FEW_SCALE_BYTES = 256;    // of a stage in MXFP4: 8 a row and box
constexpr int FEW_BARRIER_BYTES = 256;
constexpr int FEW_PITCH = 20;           // floats from one token's sums of 16 rows to the next one's
constexpr float FEW_E4M3_UNIT = 1.0f / 448.0f, FEW_LEAST_SCALE = 1e-12f, FEW_MXFP4_UNIT = 4294967296.0f;

enum class FewKind { BF16, CHANNEL, BLOCK, MXFP4 };

struct FewArguments {
  uint16_t* out;            // gate-up: [pairs, rows] in the plan's order; down: [tokens, rows]
  const uint16_t* x;        // gate-up: [tokens, ld_x]; down: [pairs, columns]
  const void* scale;        // of channels [experts, (2 ·) rows] or others, as `ExpertWeights` has them
  const uint16_t* bias;     // [experts, (2 ·) rows], or null
  const int* order;         // [pairs]
  const int* tiles;         // [num_tiles, 3]
  const int* ids;           // [tokens, top_k]
  const float* weights;     // [tokens, top_k]
  const uint16_t* shared;   // [tokens, ld_shared], or null
  const uint16_t* shared_gate;  // [tokens], or null
  float limit, slope;       // of the clamped activation
  int clamped, tokens, top_k, num_tiles;
  int rows, columns;        // of an expert's weight; rows of gate or up alone
  int tile_rows;            // of a stage: 8 of gate and of up, or up to 16 of down
  int row_tiles, chunks;    // stages that an expert's rows and columns make
  int boxes;                // of 128 bytes that a row makes
  int ld_x, ld_shared;
};

// How a kind lies in the ring.
template <FewKind kind>
struct FewLayout {
  static constexpr bool packed = kind == FewKind::MXFP4, quantized = kind == FewKind::CHANNEL || kind == FewKind::BLOCK;
  static constexpr int BOX_COLUMNS = packed ? 256 : quantized ? 128 : 64, COLUMNS = FEW_BOXES * BOX_COLUMNS;
  static constexpr int STAGES = (packed ? 2 : 3) * FEW_WARPS, DATA_BYTES = STAGES * FEW_STAGE_BYTES;
  static constexpr int RING_BYTES = DATA_BYTES + (packed ? STAGES * FEW_SCALE_BYTES : 0);
};

// Columns of a box of MXFP4, which is a step of `mxfp4_layout`: 256, then 128, 64 and 32 where they are left.
struct FewStep {
  int start, width;
};
__device__ __forceinline__ FewStep few_step(int columns, int box) {
  const int whole = columns / 256;
  if (box < whole) return {box * 256, 256};
  int start = whole * 256, over = box - whole;
#pragma unroll 1
  for (int size = 128; size >= 32; size /= 2) {
    if (!(columns & size)) continue;
    if (over-- == 0) return {start, size};
    start += size;
  }
  return {start, 0};
}

}  // namespace stoker
