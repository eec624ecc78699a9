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
