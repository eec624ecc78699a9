// Entry of the kernels of experts for few tokens for the tests.
#include "sm90_few_experts.cuh"

#include "few_before.h"

extern "C" void few_experts(int kind, int gated, int ctas, int seed, const CUtensorMap* map,
                            const stoker::FewArguments* a) {
  using stoker::FewKind;
  void (*const kernels[3][2])(const CUtensorMap&, const stoker::FewArguments&) = {
      {stoker::sm90_few_experts<FewKind::BF16, false>, stoker::sm90_few_experts<FewKind::BF16, true>},
      {stoker::sm90_few_experts<FewKind::CHANNEL, false>, stoker::sm90_few_experts<FewKind::CHANNEL, true>},
      {stoker::sm90_few_experts<FewKind::BLOCK, false>, stoker::sm90_few_experts<FewKind::BLOCK, true>}};
  const auto kernel = kernels[kind][gated];
  few_before(*a, gated, a->columns, a->rows);
  emulator::run_grid(ctas, stoker::FEW_THREADS, seed, [=] { kernel(*map, *a); });
}

extern "C" int arguments_size() { return sizeof(stoker::FewArguments); }
