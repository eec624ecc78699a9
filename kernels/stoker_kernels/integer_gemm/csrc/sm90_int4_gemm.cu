// The kernels of four-bit weights; see sm90_int4_few.cuh, sm90_int4_wide.cuh and sm90_int4_dequantize.cuh.
#include "sm90_int4_dequantize.cuh"
#include "sm90_int4_few.cuh"
#include "sm90_int4_wide.cuh"

#define FEW(TOKENS, NAME, SMALL)                                                             \
  extern "C" __global__ void __launch_bounds__(256, 2)                                        \
      sm90_int4_gemm_few_m##TOKENS##_##NAME(const __grid_constant__ stoker::Int4Arguments p) { \
    stoker::int4_few<TOKENS, SMALL>(p);                                                      \
  }
#define WIDE(TOKENS, WEIGHT_ROWS, GROUPS, STRIPS, FULL, STAGES, CTAS, REGISTERS, REST, NAME, SMALL)      \
  extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, CTAS)                                \
      sm90_int4_gemm_wide_m##TOKENS##_r##WEIGHT_ROWS##_##NAME(                                          \
          const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::Int4Arguments p) { \
    using C = stoker::Wide4<TOKENS, GROUPS, STRIPS, FULL, STAGES, REGISTERS, REST, SMALL>;              \
    static_assert(C::ROWS == WEIGHT_ROWS, "");                                                          \
    stoker::int4_wide<C>(x_map, p);                                                                     \
  }
// Groups of a block of 64 columns or more, and smaller ones.
#define WIDE_OF(...)              \
  WIDE(__VA_ARGS__, large, false) \
  WIDE(__VA_ARGS__, small, true)

FEW(8, large, false)
FEW(8, small, true)
// Tokens, rows, warpgroups that multiply, strips of the first ones, how many have as many, stages, CTAs of an SM, registers
// of the first ones and of the others.
WIDE_OF(16, 128, 2, 1, 2, 11, 2, 96, 96)
WIDE_OF(16, 320, 5, 1, 5, 12, 1, 88, 88)
WIDE_OF(32, 128, 2, 1, 2, 10, 2, 96, 96)
WIDE_OF(32, 320, 5, 1, 5, 10, 1, 88, 88)
WIDE_OF(64, 128, 2, 1, 2, 7, 2, 96, 96)
WIDE_OF(64, 320, 5, 1, 5, 8, 1, 88, 88)
WIDE_OF(128, 128, 2, 1, 2, 8, 1, 224, 224)
WIDE_OF(128, 256, 2, 2, 2, 7, 1, 224, 224)
WIDE_OF(128, 320, 2, 3, 1, 6, 1, 256, 208)

extern "C" __global__ void __launch_bounds__(256) sm90_int4_dequantize(const __grid_constant__ stoker::Int4Arguments p) {
  stoker::int4_dequantize(p);
}
