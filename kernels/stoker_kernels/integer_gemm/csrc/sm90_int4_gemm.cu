// The kernels of four-bit weights; see sm90_int4_few.cuh, sm90_int4_many.cuh and sm90_int4_dequantize.cuh.
#include "sm90_int4_dequantize.cuh"
#include "sm90_int4_few.cuh"
#include "sm90_int4_many.cuh"

#define FEW(TOKENS)                                                                     \
  extern "C" __global__ void __launch_bounds__(Few<TOKENS>::THREADS, 2)                  \
      sm90_int4_gemm_few_m##TOKENS(const __grid_constant__ Int4Arguments p) {            \
    int4_few<TOKENS>(p);                                                                 \
  }
#define MANY(TOKENS, ROW_WARPS, K_WARPS, CTAS)                                          \
  extern "C" __global__ void __launch_bounds__(ROW_WARPS* K_WARPS * 32, CTAS)            \
      sm90_int4_gemm_many_m##TOKENS##_r##ROW_WARPS##_k##K_WARPS##_c##CTAS(               \
          const __grid_constant__ Int4Arguments p) {                                     \
    int4_many<Many<TOKENS, ROW_WARPS, K_WARPS, CTAS>>(p);                                \
  }

FEW(8)
FEW(16)
MANY(32, 4, 2, 2)
MANY(32, 2, 4, 2)
MANY(64, 4, 2, 2)
MANY(64, 4, 2, 1)
MANY(64, 8, 1, 2)
MANY(64, 8, 1, 1)
MANY(128, 4, 2, 1)
MANY(128, 8, 1, 1)

extern "C" __global__ void __launch_bounds__(256) sm90_int4_dequantize(const __grid_constant__ Int4Arguments p) {
  int4_dequantize(p);
}
