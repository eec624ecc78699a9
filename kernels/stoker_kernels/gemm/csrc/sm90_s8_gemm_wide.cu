// 8-bit integers, weights scaled per channel and activations per token; see sm90_gemm_wide.cuh. An instruction for integers has
// a multiple of 16 rows.
#include "sm90_gemm_wide.cuh"

#define PLAIN(ROWS) STOKER_SM90_GEMM_WIDE(sm90_s8_gemm_wide_n##ROWS, stoker::s8, ROWS / 2, false)
#define GATED(ROWS) STOKER_SM90_GEMM_WIDE(sm90_s8_gemm_wide_gated_n##ROWS, stoker::s8, ROWS / 2, true)
#define GATED_192(ROWS) \
  STOKER_SM90_GEMM_WIDE_IN(sm90_s8_gemm_wide_gated_n##ROWS##_m192, stoker::s8, ROWS / 2, 3, true, Any)

PLAIN(128) PLAIN(160) PLAIN(192) PLAIN(224) PLAIN(256) PLAIN(288)
GATED(128) GATED(160) GATED(192) GATED(224) GATED(256) GATED(288)
GATED_192(112) GATED_192(128) GATED_192(144) GATED_192(160) GATED_192(192)
#undef PLAIN
#undef GATED
#undef GATED_192
