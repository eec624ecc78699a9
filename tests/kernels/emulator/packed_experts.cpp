// Entry of the kernels of experts in four bits for the tests.
#include "sm90_packed_experts.cuh"

#include "few_before.h"

extern "C" void packed_experts(int kind, int gated, int ctas, int seed, const stoker::PackedArguments* arguments) {
  using stoker::PackedKind;
  void (*const kernels[3][2])(const stoker::PackedArguments&) = {
      {stoker::sm90_packed_experts<PackedKind::MXFP4, false>, stoker::sm90_packed_experts<PackedKind::MXFP4, true>},
      {stoker::sm90_packed_experts<PackedKind::NVFP4, false>, stoker::sm90_packed_experts<PackedKind::NVFP4, true>},
      {stoker::sm90_packed_experts<PackedKind::INT4, false>, stoker::sm90_packed_experts<PackedKind::INT4, true>}};
  const auto kernel = kernels[kind][gated];
  const stoker::FewArguments& a = arguments->few;
  few_before(a, gated, gated ? a.columns : a.ld_x, gated ? arguments->ld_out : a.rows);
  emulator::run_grid(ctas, stoker::FEW_THREADS, seed, [=] { kernel(*arguments); });
}

extern "C" int arguments_size() { return sizeof(stoker::PackedArguments); }
