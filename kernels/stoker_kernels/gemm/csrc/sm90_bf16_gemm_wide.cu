// bf16; see sm90_gemm_wide.cuh.
#include "sm90_gemm_wide.cuh"

STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_n128, __nv_bfloat16, 64, false)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_n160, __nv_bfloat16, 80, false)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_n192, __nv_bfloat16, 96, false)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_n224, __nv_bfloat16, 112, false)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n128, __nv_bfloat16, 64, true)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n160, __nv_bfloat16, 80, true)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n192, __nv_bfloat16, 96, true)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n224, __nv_bfloat16, 112, true)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n256, __nv_bfloat16, 128, true)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n288, __nv_bfloat16, 144, true)
