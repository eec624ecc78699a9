// e4m3 weights (scaled per channel or as a whole) and activations (scaled per token); see sm90_gemm_spread.cuh.
#include "sm90_gemm_spread.cuh"

STOKER_SM90_GEMM_SPREAD_EVERY(sm90_e4m3_gemm_spread, stoker::e4m3)
