// Entries of the GEMM kernels of 8-bit integers for the tests; every kernel of the .cu files can be given by its address.
#include "launch.h"
#include "sm90_s8_gemm_cluster.cu"
#include "sm90_s8_gemm_multicast.cu"
#include "sm90_s8_gemm_spread.cu"
#include "sm90_s8_gemm_wide.cu"
#include "gemm_entries.h"
