// 8-bit integers, weights scaled per channel and activations per token; see sm90_gemm_multicast.cuh.
#include "sm90_gemm_multicast.cuh"

STOKER_SM90_GEMM_MULTICAST(sm90_s8_gemm_multicast, stoker::s8, 64, 64)
STOKER_SM90_GEMM_MULTICAST(sm90_s8_gemm_multicast, stoker::s8, 64, 128)
STOKER_SM90_GEMM_MULTICAST(sm90_s8_gemm_multicast, stoker::s8, 128, 64)
STOKER_SM90_GEMM_MULTICAST(sm90_s8_gemm_multicast, stoker::s8, 128, 128)
