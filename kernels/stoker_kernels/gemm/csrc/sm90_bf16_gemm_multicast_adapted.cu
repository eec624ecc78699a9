// bf16 weights and activations of 33 to 64 tokens, with what adapters add; see sm90_gemm_multicast.cuh.
#include "sm90_gemm_multicast.cuh"

STOKER_SM90_GEMM_MULTICAST_ADAPTED(sm90_bf16_gemm_multicast_adapted, 64, 64)
STOKER_SM90_GEMM_MULTICAST_ADAPTED(sm90_bf16_gemm_multicast_adapted, 128, 64)
