// bf16 weights and activations; see sm90_gemm_multicast.cuh.
#include "sm90_gemm_multicast.cuh"

STOKER_SM90_GEMM_MULTICAST(sm90_bf16_gemm_multicast, __nv_bfloat16, 64, 64)
STOKER_SM90_GEMM_MULTICAST(sm90_bf16_gemm_multicast, __nv_bfloat16, 64, 128)
STOKER_SM90_GEMM_MULTICAST(sm90_bf16_gemm_multicast, __nv_bfloat16, 128, 64)
STOKER_SM90_GEMM_MULTICAST(sm90_bf16_gemm_multicast, __nv_bfloat16, 128, 128)
