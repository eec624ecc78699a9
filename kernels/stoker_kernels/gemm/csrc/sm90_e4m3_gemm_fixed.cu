// e4m3 weights and activations, where a row's bits may not depend on the batch; see sm90_gemm_wide.cuh.
#include "sm90_gemm_wide.cuh"

#define WHOLE(ROWS) STOKER_SM90_GEMM_WIDE_IN(sm90_e4m3_gemm_fixed_n##ROWS, stoker::e4m3, ROWS / 2, 2, false, Whole)
#define PARTS(ROWS) STOKER_SM90_GEMM_WIDE_IN(sm90_e4m3_gemm_fixed_parts_n##ROWS, stoker::e4m3, ROWS / 2, 2, false, Parts)

WHOLE(128) WHOLE(160) WHOLE(192) WHOLE(224)
PARTS(128)

#undef WHOLE
#undef PARTS
