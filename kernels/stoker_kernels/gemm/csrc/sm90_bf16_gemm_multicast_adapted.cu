// bf16 weights and activations of 33 to 64 tokens, with what adapters add; see sm90_gemm_multicast.cuh.
#include "sm90_gemm_multicast.cuh"

#define ADAPTED(BN)                                                                                                   \
  extern "C" __global__ void __launch_bounds__((BN) * 2 + 32, 2) sm90_bf16_gemm_multicast_adapted_n##BN##_c1_m64(     \
      const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,                           \
      const __grid_constant__ stoker::GemmArguments g, const __grid_constant__ stoker::AdapterArguments adapters) {   \
    stoker::sm90_gemm_multicast<__nv_bfloat16, BN, 64>(w_map, x_map, g, adapters);                                    \
  }

ADAPTED(64)
ADAPTED(128)

#undef ADAPTED
