// Entries of the kernels that adapters run in for the tests; every kernel can be given by its address.
#include "launch.h"
#include "sm90_bf16_gemm_cluster_adapted.cu"
#include "sm90_bf16_gemm_gated_adapted.cu"
#include "sm90_bf16_gemm_multicast_adapted.cu"
#include "sm90_bf16_lora_expand.cu"
#include "sm90_bf16_lora_shrink.cu"

extern "C" void run_adapted_gemm(
    void (*kernel)(CUtensorMap, CUtensorMap, CUtensorMap, stoker::GemmArguments, stoker::AdapterArguments),
    const CUtensorMap* w_map, const CUtensorMap* x_map, const CUtensorMap* b_map, const stoker::GemmArguments* g,
    const stoker::AdapterArguments* adapters, const Launch* l) {
  run(l, [=] { kernel(*w_map, *x_map, *b_map, *g, *adapters); });
}

extern "C" void run_lora_shrink(void (*kernel)(stoker::ShrinkArguments), const stoker::ShrinkArguments* g,
                                const Launch* l) {
  run(l, [=] { kernel(*g); });
}

extern "C" void run_lora_expand(void (*kernel)(stoker::ExpandArguments), const stoker::ExpandArguments* g,
                                const Launch* l) {
  run(l, [=] { kernel(*g); });
}

extern "C" int adapter_arguments_size() { return sizeof(stoker::AdapterArguments); }
extern "C" int pair_list_bytes() { return sizeof(stoker::PairList); }
extern "C" int shrink_arguments_size() { return sizeof(stoker::ShrinkArguments); }
extern "C" int expand_arguments_size() { return sizeof(stoker::ExpandArguments); }
