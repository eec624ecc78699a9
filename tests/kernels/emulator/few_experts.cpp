// Entry of the kernels of experts for few tokens for the tests. The kernel before gate-up writes x and the plan or logits,
// the one before down its rows, and both may still read what these write.
#include "sm90_few_experts.cuh"

extern "C" void few_experts(int kind, int gated, int ctas, int seed, const CUtensorMap* map,
                            const stoker::FewArguments* a) {
  using stoker::FewKind;
  void (*const kernels[3][2])(const CUtensorMap&, const stoker::FewArguments&) = {
      {stoker::sm90_few_experts<FewKind::BF16, false>, stoker::sm90_few_experts<FewKind::BF16, true>},
      {stoker::sm90_few_experts<FewKind::CHANNEL, false>, stoker::sm90_few_experts<FewKind::CHANNEL, true>},
      {stoker::sm90_few_experts<FewKind::BLOCK, false>, stoker::sm90_few_experts<FewKind::BLOCK, true>}};
  const auto kernel = kernels[kind][gated];
  const auto region = [](const void* at, int64_t bytes) {
    return emulator::Region{const_cast<unsigned char*>(static_cast<const unsigned char*>(at)), bytes};
  };
  const int pairs = a->tokens * a->top_k, x_rows = gated ? a->tokens : pairs;
  auto& before = emulator::predecessor;
  before.writes = {region(a->x, (static_cast<int64_t>(x_rows - 1) * a->ld_x + a->columns) * 2)};
  if (gated && a->logits != nullptr) {
    before.writes.push_back(region(a->logits, (static_cast<int64_t>(a->tokens - 1) * a->ld_logits + a->experts) * 2));
  } else if (gated) {
    before.writes.push_back(region(a->order, pairs * 4));
    before.writes.push_back(region(a->tiles, a->num_tiles * 12));
  }
  before.out = reinterpret_cast<const unsigned char*>(a->out);
  before.out_bytes = static_cast<int64_t>(gated ? pairs : a->tokens) * a->rows * 2;
  emulator::run_grid(ctas, stoker::FEW_THREADS, seed, [=] { kernel(*map, *a); });
}

extern "C" int arguments_size() { return sizeof(stoker::FewArguments); }
