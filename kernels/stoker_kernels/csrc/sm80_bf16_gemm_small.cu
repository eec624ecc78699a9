// bf16 weights and activations on any SM from 8.0 on; see sm80_gemm_small.cuh.
#include "sm80_gemm_small.cuh"

STOKER_SM80_GEMM_SMALL(sm80_bf16_gemm_small, 128, 1, 8, 6)
STOKER_SM80_GEMM_SMALL(sm80_bf16_gemm_small, 128, 1, 16, 6)
STOKER_SM80_GEMM_SMALL(sm80_bf16_gemm_small, 128, 1, 32, 5)
STOKER_SM80_GEMM_SMALL(sm80_bf16_gemm_small, 128, 1, 64, 4)
