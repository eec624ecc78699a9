// bf16 weights and activations of up to 8 tokens, with what adapters add; see sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, 64, 1)
STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, 64, 2)
STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, 128, 1)
STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_cluster_adapted, false, 128, 2)
