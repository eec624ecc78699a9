// bf16 gate and up projections with silu(gate) · up; see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

#define GATED(BN, KC, MT)                                                                                  \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, 2)                                           \
      sm90_bf16_gemm_gated_n##BN##_c##KC##_m##MT(const __grid_constant__ CUtensorMap w_map,                \
                                                 const __grid_constant__ CUtensorMap x_map,                \
                                                 const __grid_constant__ stoker::GemmArguments g) {        \
    stoker::sm90_gemm_cluster<__nv_bfloat16, BN, KC, MT, true>(w_map, x_map, g, w_map);                    \
  }

#define TOKENS(BN, KC) GATED(BN, KC, 8) GATED(BN, KC, 16) GATED(BN, KC, 32) GATED(BN, KC, 64)

TOKENS(64, 1)
TOKENS(64, 2)
TOKENS(128, 1)
