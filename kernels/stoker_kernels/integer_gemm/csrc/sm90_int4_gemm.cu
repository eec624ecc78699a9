// The kernels of four-bit weights; see sm90_int4_few.cuh, sm90_int4_wide.cuh and sm90_int4_dequantize.cuh.
#include "sm90_int4_dequantize.cuh"
#include "sm90_int4_few.cuh"
#include "sm90_int4_wide.cuh"

#define FEW(TOKENS, NAME, SMALL)                                                             \
  extern "C" __global__ void __launch_bounds__(256, 2)                                        \
      sm90_int4_gemm_few_m##TOKENS##_##NAME(const __grid_constant__ stoker::Int4Arguments p) { \
    stoker::int4_few<TOKENS, SMALL>(p);                                                      \
  }
#define WIDE(TOKENS, GROUPS, STAGES, CTAS, NAME, SMALL)                                      \
  extern "C" __global__ void __launch_bounds__(GROUPS * 128, CTAS)                           \
      sm90_int4_gemm_wide_m##TOKENS##_g##GROUPS##_##NAME(                                    \
          const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::Int4Arguments p) { \
    stoker::int4_wide<stoker::Wide4<TOKENS, GROUPS, STAGES>, SMALL>(x_map, p);               \
  }
// Groups of a block of 64 columns or more, and smaller ones.
#define FEW_OF(TOKENS) FEW(TOKENS, large, false) FEW(TOKENS, small, true)
#define WIDE_OF(TOKENS, GROUPS, STAGES, CTAS)      \
  WIDE(TOKENS, GROUPS, STAGES, CTAS, large, false) \
  WIDE(TOKENS, GROUPS, STAGES, CTAS, small, true)

FEW_OF(8)
FEW_OF(16)
WIDE_OF(32, 2, 8, 2)
WIDE_OF(64, 2, 6, 2)
WIDE_OF(128, 2, 5, 1)
WIDE_OF(256, 2, 4, 1)

extern "C" __global__ void __launch_bounds__(256) sm90_int4_dequantize(const __grid_constant__ stoker::Int4Arguments p) {
  stoker::int4_dequantize(p);
}
