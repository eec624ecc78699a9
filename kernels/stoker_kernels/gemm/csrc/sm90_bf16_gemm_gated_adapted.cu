// Gate and up projections with silu(gate) · up, and what adapters add to both before; see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

#define TOKENS(BN, KC)                                                              \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, BN, KC, 8)   \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, BN, KC, 16)  \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, BN, KC, 32)  \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, BN, KC, 64)

TOKENS(64, 1)
TOKENS(64, 2)
TOKENS(128, 1)

#undef TOKENS
