// bf16; see sm90_gemm_wide.cuh.
#include "sm90_gemm_wide.cuh"

STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_n224, __nv_bfloat16, 112, false)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n288, __nv_bfloat16, 144, true)
STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n256, __nv_bfloat16, 128, true)
