// bf16 weights and activations, with what adapters add; see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

#define TOKENS(BN, KC)                                                                  \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, BN, KC, 8)    \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, BN, KC, 16)   \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, BN, KC, 32)   \
  STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, BN, KC, 64)

TOKENS(64, 1)
TOKENS(64, 2)
TOKENS(128, 1)
TOKENS(128, 2)

#undef TOKENS
