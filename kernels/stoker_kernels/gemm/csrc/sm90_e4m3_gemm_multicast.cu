// e4m3 weights (scaled per channel or per tensor) and activations (scaled per token); see sm90_gemm_multicast.cuh.
#include "sm90_gemm_multicast.cuh"

using stoker::e4m3;
STOKER_SM90_GEMM_MULTICAST(sm90_e4m3_gemm_multicast, e4m3, 64, 64)
STOKER_SM90_GEMM_MULTICAST(sm90_e4m3_gemm_multicast, e4m3, 64, 128)
STOKER_SM90_GEMM_MULTICAST(sm90_e4m3_gemm_multicast, e4m3, 128, 64)
STOKER_SM90_GEMM_MULTICAST(sm90_e4m3_gemm_multicast, e4m3, 128, 128)
