// bf16, where a row's bits may not depend on the batch; see sm90_gemm_wide.cuh.
#include "sm90_gemm_wide.cuh"

#define WHOLE(ROWS) STOKER_SM90_GEMM_WIDE_IN(sm90_bf16_gemm_fixed_n##ROWS, __nv_bfloat16, ROWS / 2, 2, false, Whole)
#define GATED(ROWS) STOKER_SM90_GEMM_WIDE_IN(sm90_bf16_gemm_fixed_gated_n##ROWS, __nv_bfloat16, ROWS / 2, 2, true, Whole)
#define PARTS(ROWS) STOKER_SM90_GEMM_WIDE_IN(sm90_bf16_gemm_fixed_parts_n##ROWS, __nv_bfloat16, ROWS / 2, 2, false, Parts)

WHOLE(128) WHOLE(160) WHOLE(192) WHOLE(224)
GATED(128) GATED(160) GATED(192) GATED(224) GATED(256) GATED(288)
PARTS(128) PARTS(160)

#undef WHOLE
#undef GATED
#undef PARTS
