// What starts the GEMM kernels by their address, included behind them.
#pragma once
#include "launch.h"

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
