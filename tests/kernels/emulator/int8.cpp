// Entries of the GEMM kernels of 8-bit integers for the tests; every kernel of the .cu files can be given by its address.
#include "launch.h"
#include "sm90_s8_gemm_cluster.cu"
#include "sm90_s8_gemm_multicast.cu"
#include "sm90_s8_gemm_spread.cu"
#include "sm90_s8_gemm_wide.cu"

extern "C" void run_cluster_gemm(void (*kernel)(CUtensorMap, CUtensorMap, stoker::GemmArguments),
                                 const CUtensorMap* w_map, const CUtensorMap* x_map, const stoker::GemmArguments* g,
                                 const Launch* l) {
  run(l, [=] { kernel(*w_map, *x_map, *g); });
}

extern "C" void run_wide_gemm(void (*kernel)(CUtensorMap, CUtensorMap, stoker::WideArguments), const CUtensorMap* w_map,
                              const CUtensorMap* x_map, const stoker::WideArguments* g, const Launch* l) {
  run(l, [=] { kernel(*w_map, *x_map, *g); });
}

extern "C" int cluster_arguments_size() { return sizeof(stoker::GemmArguments); }
extern "C" int wide_arguments_size() { return sizeof(stoker::WideArguments); }
