// 8-bit integers, weights scaled per channel and activations per token; see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

#define TOKENS(BN, KC)                                       \
  STOKER_SM90_GEMM_CLUSTER(sm90_s8_gemm_cluster, s8, BN, KC, 8)  \
  STOKER_SM90_GEMM_CLUSTER(sm90_s8_gemm_cluster, s8, BN, KC, 16) \
  STOKER_SM90_GEMM_CLUSTER(sm90_s8_gemm_cluster, s8, BN, KC, 32) \
  STOKER_SM90_GEMM_CLUSTER(sm90_s8_gemm_cluster, s8, BN, KC, 64) \
  STOKER_SM90_GEMM_CLUSTER(sm90_s8_gemm_cluster, s8, BN, KC, 128)

using stoker::s8;
TOKENS(64, 1)
TOKENS(64, 2)
TOKENS(128, 1)
TOKENS(128, 2)
#undef TOKENS
