// Experts in four bits as bf16, once for all tokens of a step that multiply with them many times: see packed_codes.cuh.
//
// A warp has rows in turn, a lane two neighbouring words of a row: of these 16 codes two each are of columns that follow
// each other, so that a code place of 16 lanes is 64 bytes of the result.
#pragma once
#include "packed_codes.cuh"

namespace stoker {

struct UnpackArguments {
  __nv_bfloat16* out;           // [all_rows, columns]
  const unsigned char* weight;  // [all_rows, columns / 2]
  const unsigned char* scales;  // [experts, lines, rows, SCALE_BYTES]
  const float* factor;          // of NVFP4: [all_rows]
  int all_rows, rows, columns;  // of all experts, of one
  int lines;                    // of scales that an expert has
  int group_shift;              // of INT4: the logarithm of a group's columns, 31 for whole rows
};

constexpr int UNPACK_THREADS = 256;

// What two columns lack, in one rounding.
__device__ __forceinline__ uint32_t unpacked(uint32_t pair, float unit) {
  return pack_bf16(bf16_low(pair) * unit, bf16_high(pair) * unit);
}

template <PackedKind kind>
__device__ __forceinline__ void sm90_unpacked_experts(const UnpackArguments& a) {
  using Layout = PackedLayout<kind>;
  using Codes = typename Layout::Codes;
  const int lane = threadIdx.x % 32, warps = gridDim.x * (UNPACK_THREADS / 32), words = a.columns / 8;
  for (int row = blockIdx.x * (UNPACK_THREADS / 32) + threadIdx.x / 32; row < a.all_rows; row += warps) {
    const int expert = row / a.rows, inside = row - expert * a.rows;
    const unsigned char* const weight = a.weight + static_cast<int64_t>(row) * words * 4;
    __nv_bfloat16* const out = a.out + static_cast<int64_t>(row) * a.columns;
    const float unit = kind == PackedKind::NVFP4 ? Layout::UNIT * a.factor[row] : Layout::UNIT;
    const auto line = [&](int i) {
      return a.scales + ((static_cast<int64_t>(expert) * a.lines + i) * a.rows + inside) * Codes::SCALE_BYTES;
    };
    for (int word = 2 * lane; word < words; word += 64) {
      const PackedStep step = packed_step<Layout::STEP_WORDS>(word, a.columns);
      const Codes codes(step, a.group_shift, line);
      const uint2 two = *reinterpret_cast<const uint2*>(weight + word * 4);
      uint32_t first[4], second[4];
      codes.unpack(two.x, first);
      codes.unpack(two.y, second);
      __nv_bfloat16* const to = out + step.column + word - step.column / 8;
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const uint32_t low = __byte_perm(first[f], second[f], 0x5410), high = __byte_perm(first[f], second[f], 0x7632);
        const bool whole = kind == PackedKind::INT4;
        *reinterpret_cast<uint32_t*>(to + 2 * f * step.words) = whole ? low : unpacked(low, unit);
        *reinterpret_cast<uint32_t*>(to + (2 * f + 1) * step.words) = whole ? high : unpacked(high, unit);
      }
    }
  }
}

}  // namespace stoker

#define STOKER_SM90_UNPACKED_EXPERTS(name, kind)                                                 \
  extern "C" __global__ void __launch_bounds__(stoker::UNPACK_THREADS)                           \
      name(const __grid_constant__ stoker::UnpackArguments a) {                                  \
    stoker::sm90_unpacked_experts<stoker::PackedKind::kind>(a);                                  \
  }
