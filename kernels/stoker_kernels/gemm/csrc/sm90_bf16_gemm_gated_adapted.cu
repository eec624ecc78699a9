// Gate and up projections with silu(gate) · up of up to 8 tokens, and what adapters add to both before; see
// sm90_gemm_cluster.cuh.
#include "sm90_gemm_cluster.cuh"

STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, 64, 1)
STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, 64, 2)
STOKER_SM90_GEMM_CLUSTER_ADAPTED(sm90_bf16_gemm_gated_adapted, true, 128, 1)
