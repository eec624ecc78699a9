// The kernels of weights in floats of four bits. Blocks of 32 columns, and of 16 with a factor a row.
#include "fp4_numbers.cuh"
#include "fragments_kernels.cuh"

FRAGMENTS_OF_FOUR_BITS(sm90_fp4_gemm, mxfp4, 7, stoker::Mxfp4)
FRAGMENTS_OF_FOUR_BITS(sm90_fp4_gemm, nvfp4, 7, stoker::Nvfp4)
