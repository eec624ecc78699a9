// 8-bit integers, weights scaled per channel and activations per token; see sm90_gemm_spread.cuh. An instruction for integers
// has a multiple of 16 rows.
#include "sm90_gemm_spread.cuh"

#define ROWS(ROWS, TOKENS) STOKER_SM90_GEMM_SPREAD(sm90_s8_gemm_spread, stoker::s8, ROWS, TOKENS)
#define FEW(TOKENS) ROWS(64, TOKENS) ROWS(80, TOKENS) ROWS(96, TOKENS) ROWS(112, TOKENS) ROWS(128, TOKENS) ROWS(160, TOKENS)

FEW(128) FEW(192) FEW(256)
ROWS(144, 128) ROWS(176, 128) ROWS(192, 128) ROWS(208, 128) ROWS(224, 128) ROWS(240, 128) ROWS(256, 128)
ROWS(144, 192) ROWS(176, 192) ROWS(192, 192)
#undef FEW
#undef ROWS
