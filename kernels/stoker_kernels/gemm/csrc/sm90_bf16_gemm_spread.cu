// bf16; see sm90_gemm_spread.cuh.
#include "sm90_gemm_spread.cuh"

STOKER_SM90_GEMM_SPREAD_EVERY(sm90_bf16_gemm_spread, __nv_bfloat16)
