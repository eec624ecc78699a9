// bf16 weights and activations, with what adapters add; see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

#define ADAPTED(BN, KC, MT)                                                                                              \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, (BN) * (MT) < 128 * 64 ? 2 : 1)                            \
      sm90_bf16_gemm_cluster_adapted_n##BN##_c##KC##_m##MT(                                                              \
      const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                              \
      const __grid_constant__ stoker::GemmArguments g, const __grid_constant__ stoker::AdapterArguments adapters) {      \
    stoker::sm90_gemm_cluster<__nv_bfloat16, BN, KC, MT, false>(w_map, x_map, g, adapters);                              \
  }

#define TOKENS(BN, KC) ADAPTED(BN, KC, 8) ADAPTED(BN, KC, 16) ADAPTED(BN, KC, 32) ADAPTED(BN, KC, 64)

TOKENS(64, 1)
TOKENS(64, 2)
TOKENS(128, 1)
TOKENS(128, 2)

#undef ADAPTED
#undef TOKENS
