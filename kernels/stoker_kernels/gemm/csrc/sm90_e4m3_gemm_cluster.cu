// e4m3 weights (scaled per channel or per tensor) and activations (scaled per token); see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

#define TOKENS(BN, KC)                                           \
  STOKER_SM90_GEMM_CLUSTER(sm90_e4m3_gemm_cluster, e4m3, BN, KC, 8)  \
  STOKER_SM90_GEMM_CLUSTER(sm90_e4m3_gemm_cluster, e4m3, BN, KC, 16) \
  STOKER_SM90_GEMM_CLUSTER(sm90_e4m3_gemm_cluster, e4m3, BN, KC, 32) \
  STOKER_SM90_GEMM_CLUSTER(sm90_e4m3_gemm_cluster, e4m3, BN, KC, 64) \
  STOKER_SM90_GEMM_CLUSTER(sm90_e4m3_gemm_cluster, e4m3, BN, KC, 128)

using stoker::e4m3;
TOKENS(64, 1)
TOKENS(64, 2)
TOKENS(128, 1)
TOKENS(128, 2)
