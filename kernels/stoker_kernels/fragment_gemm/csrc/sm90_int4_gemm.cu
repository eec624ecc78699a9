// The kernels of weights in integers of four bits. Groups of a block of 64 columns or more, and smaller ones.
#include "integer_numbers.cuh"
#include "fragments_kernels.cuh"

FRAGMENTS_OF_FOUR_BITS(sm90_int4_gemm, large, 7, stoker::Int4<false>)
FRAGMENTS_OF_FOUR_BITS(sm90_int4_gemm, small, 6, stoker::Int4<true>)
