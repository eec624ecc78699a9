// Entries of the GEMM kernels with clusters for the tests; every kernel of the .cu files can be given by its address.
#include "launch.h"
#include "sm90_bf16_gemm_fixed.cu"
#include "sm90_bf16_gemm_gated.cu"
#include "sm90_bf16_gemm_multicast.cu"
#include "sm90_bf16_gemm_spread.cu"
#include "sm90_bf16_gemm_wide.cu"
#include "sm90_e4m3_gemm_fixed.cu"
#include "sm90_e4m3_gemm_spread.cu"
#include "sm90_e4m3_gemm_wide.cu"

STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 1, 8)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 1, 32)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 1, 128)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 2, 8)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 128, 1, 64)

#include "gemm_entries.h"
