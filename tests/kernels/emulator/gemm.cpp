// Entries of the GEMM kernels with clusters for the tests; every kernel of the .cu files can be given by its address.
#include "sm90_bf16_gemm_gated.cu"
#undef TOKENS
#include "sm90_bf16_gemm_cluster_adapted.cu"
#include "sm90_bf16_gemm_gated_adapted.cu"
#include "sm90_bf16_gemm_multicast.cu"
#include "sm90_bf16_gemm_multicast_adapted.cu"
#include "sm90_bf16_gemm_wide.cu"
#include "sm90_bf16_lora_shrink.cu"
#include "sm90_e4m3_gemm_wide.cu"

STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 1, 8)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 1, 32)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 1, 128)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 64, 2, 8)
STOKER_SM90_GEMM_CLUSTER(sm90_bf16_gemm_cluster, __nv_bfloat16, 128, 1, 64)

namespace {

struct Launch {
  int ctas, cluster, threads, seed;
  unsigned char* x;
  int64_t x_bytes;
  const unsigned char* out;
  int64_t out_bytes;
};

void run(const Launch* l, std::function<void()> kernel) {
  if (l->x_bytes) emulator::predecessor.writes = {{l->x, l->x_bytes}};
  emulator::predecessor.out = l->out, emulator::predecessor.out_bytes = l->out_bytes;
  emulator::run_grid(l->ctas, l->threads, l->seed, kernel, l->cluster);
}

}  // namespace

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
extern "C" void run_adapted_gemm(
    void (*kernel)(CUtensorMap, CUtensorMap, stoker::GemmArguments, stoker::AdapterArguments), const CUtensorMap* w_map,
    const CUtensorMap* x_map, const stoker::GemmArguments* g, const stoker::AdapterArguments* adapters, const Launch* l) {
  run(l, [=] { kernel(*w_map, *x_map, *g, *adapters); });
}

extern "C" void run_lora_shrink(void (*kernel)(stoker::ShrinkArguments), const stoker::ShrinkArguments* g,
                                const Launch* l) {
  run(l, [=] { kernel(*g); });
}

extern "C" int adapter_arguments_size() { return sizeof(stoker::AdapterArguments); }
extern "C" int shrink_arguments_size() { return sizeof(stoker::ShrinkArguments); }
extern "C" int wide_arguments_size() { return sizeof(stoker::WideArguments); }
