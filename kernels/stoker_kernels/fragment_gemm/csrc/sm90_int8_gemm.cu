// The kernels of weights in integers of eight bits. Groups of a block of 64 columns or more, and smaller ones.
#include "integer_numbers.cuh"
#include "fragments_kernels.cuh"

FRAGMENTS_OF_EIGHT_BITS(sm90_int8_gemm, large, stoker::Int8<false>)
FRAGMENTS_OF_EIGHT_BITS(sm90_int8_gemm, small, stoker::Int8<true>)
