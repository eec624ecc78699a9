// bf16; see sm90_gemm_wide.cuh.
#include "sm90_gemm_wide.cuh"

#define WIDE(ROWS) STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_n##ROWS, __nv_bfloat16, ROWS / 2, false)
#define WIDE_GATED(ROWS) STOKER_SM90_GEMM_WIDE(sm90_bf16_gemm_wide_gated_n##ROWS, __nv_bfloat16, ROWS / 2, true)
#define WIDE_GATED_OF(TOKENS, ROWS)                                                                             \
  STOKER_SM90_GEMM_WIDE_IN(sm90_bf16_gemm_wide_gated_n##ROWS##_m##TOKENS, __nv_bfloat16, ROWS / 2, TOKENS / 64, \
                           true, Any)

WIDE(128)
WIDE(160)
WIDE(192)
WIDE(224)
WIDE_GATED(128)
WIDE_GATED(160)
WIDE_GATED(192)
WIDE_GATED(224)
WIDE_GATED(256)
WIDE_GATED(272)
WIDE_GATED(288)
WIDE_GATED_OF(64, 224)
WIDE_GATED_OF(64, 256)
WIDE_GATED_OF(64, 272)
WIDE_GATED_OF(64, 288)
WIDE_GATED_OF(192, 112)
WIDE_GATED_OF(192, 128)
WIDE_GATED_OF(192, 144)
WIDE_GATED_OF(192, 160)
WIDE_GATED_OF(192, 192)
