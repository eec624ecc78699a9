// e4m3 weights (scaled per channel) and activations (scaled per token); see sm90_gemm_wide.cuh.
#include "sm90_gemm_wide.cuh"

STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_n128, stoker::e4m3, 64, false)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_n160, stoker::e4m3, 80, false)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_n192, stoker::e4m3, 96, false)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_n224, stoker::e4m3, 112, false)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_n256, stoker::e4m3, 128, false)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_n288, stoker::e4m3, 144, false)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_gated_n128, stoker::e4m3, 64, true)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_gated_n160, stoker::e4m3, 80, true)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_gated_n192, stoker::e4m3, 96, true)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_gated_n224, stoker::e4m3, 112, true)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_gated_n256, stoker::e4m3, 128, true)
STOKER_SM90_GEMM_WIDE(sm90_e4m3_gemm_wide_gated_n288, stoker::e4m3, 144, true)
