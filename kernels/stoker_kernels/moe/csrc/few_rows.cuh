// Rows of x on their way to shared memory, as the products of few_products.cuh read them.
#pragma once
#include "few_arguments.cuh"

namespace stoker {

template <FewKind kind>
struct FewRows {
  using Layout = FewLayout<kind>;

  const FewArguments& a;
  const int count, pitch;
  unsigned char* const x;
  float* const x_scale;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ FewRows(const FewArguments& arguments, int rows, int bytes, unsigned char* to, float* scales)
      : a(arguments), count(rows), pitch(bytes), x(to), x_scale(scales) {}

  // A warp takes a row, a lane every so-many-th 16 bytes: as they are, or rounded to e4m3 with a scale a row, as f16, which
  // holds them all.
  __device__ __forceinline__ void bring_rows() const {
    if (Layout::packed) return bring_steps();
    const int vectors = a.chunks * (Layout::COLUMNS / 8);
#pragma unroll 1
    for (int row = (warp + FEW_WARPS - 1) % FEW_WARPS; row < count; row += FEW_WARPS) {
      const uint16_t* from = a.x + static_cast<int64_t>(row) * a.ld_x;
      int4* to = reinterpret_cast<int4*>(x + row * pitch);
#pragma unroll 1
      for (int v = lane; v < vectors; v += 32) copy_async_16(to + v, from + v * 8, v * 8 < a.columns);
      if (Layout::quantized) round_row(row, to, vectors);
    }
    copies_wait();
  }

  // For MXFP4: a lane takes a word of a step; the eight columns of its codes become 16 bytes. Of the eight words that a lane
  // multiplies each quarter begins at another place, so that they lie in other banks.
  __device__ __forceinline__ void bring_steps() const {
    const int place = lane / 8 * 128 + (lane % 8 + lane / 8 * 2) % 8 * 16;
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
#pragma unroll 1
      for (int box = (warp + row) % FEW_WARPS; box < a.chunks * FEW_BOXES; box += FEW_WARPS) {
        const FewStep at = few_step(a.columns, box);
        const int words = at.width / 8;
        const uint16_t* from = a.x + static_cast<int64_t>(row) * a.ld_x + at.start + lane;
        uint32_t pairs_of[4] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (lane < words) pairs_of[i / 2] |= load_16_bits(from + i * words) << (i % 2 * 16);
        }
        *reinterpret_cast<uint4*>(x + row * pitch + box * 512 + place) =
            make_uint4(pairs_of[0], pairs_of[1], pairs_of[2], pairs_of[3]);
      }
    }
  }

  __device__ __forceinline__ void round_row(int row, int4* values, int vectors) const {
    copies_wait();
    float greatest = 0.0f;
#pragma unroll 2
    for (int v = lane; v < vectors; v += 32) {
      const int4 some = values[v];
      greatest = fmaxf(greatest, fmaxf(fmaxf(larger(some.x), larger(some.y)), fmaxf(larger(some.z), larger(some.w))));
    }
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, mask));
    const float scale = fmaxf(greatest * FEW_E4M3_UNIT, FEW_LEAST_SCALE), unit = 1.0f / scale;
    if (lane == 0) x_scale[row] = scale;
#pragma unroll 2
    for (int v = lane; v < vectors; v += 32) {
      const int4 some = values[v];
      values[v] = make_int4(rounded(some.x, unit), rounded(some.y, unit), rounded(some.z, unit), rounded(some.w, unit));
    }
  }
  static __device__ __forceinline__ float larger(int pair) {
    return fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair)));
  }
  static __device__ __forceinline__ int rounded(int pair, float unit) {
    uint32_t low, high;
    unpack_e4m3(e4m3_pair(bf16_low(pair) * unit, bf16_high(pair) * unit), low, high);
    return static_cast<int>(low);
  }
};

}  // namespace stoker
