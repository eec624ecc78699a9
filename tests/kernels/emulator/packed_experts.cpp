// Entry of the kernels of experts in four bits for the tests: what few_experts.cpp says of who runs before.
#include "sm90_packed_experts.cuh"

extern "C" void packed_experts(int kind, int gated, int ctas, int seed, const stoker::PackedArguments* arguments) {
  using stoker::PackedKind;
  void (*const kernels[3][2])(const stoker::PackedArguments&) = {
      {stoker::sm90_packed_experts<PackedKind::MXFP4, false>, stoker::sm90_packed_experts<PackedKind::MXFP4, true>},
      {stoker::sm90_packed_experts<PackedKind::NVFP4, false>, stoker::sm90_packed_experts<PackedKind::NVFP4, true>},
      {stoker::sm90_packed_experts<PackedKind::INT4, false>, stoker::sm90_packed_experts<PackedKind::INT4, true>}};
  const auto kernel = kernels[kind][gated];
  const stoker::FewArguments* a = &arguments->few;
  const auto region = [](const void* at, int64_t bytes) {
    return emulator::Region{const_cast<unsigned char*>(static_cast<const unsigned char*>(at)), bytes};
  };
  const int pairs = a->tokens * a->top_k, x_rows = gated ? a->tokens : pairs;
  auto& before = emulator::predecessor;
  before.writes = {region(a->x, (static_cast<int64_t>(x_rows - 1) * a->ld_x + (gated ? a->columns : a->ld_x)) * 2)};
  if (gated && a->logits != nullptr) {
    before.writes.push_back(region(a->logits, (static_cast<int64_t>(a->tokens - 1) * a->ld_logits + a->experts) * 2));
  } else if (gated) {
    before.writes.push_back(region(a->order, pairs * 4));
    before.writes.push_back(region(a->tiles, a->num_tiles * 12));
  }
  before.out = reinterpret_cast<const unsigned char*>(a->out);
  before.out_bytes = static_cast<int64_t>(gated ? pairs : a->tokens) * (gated ? arguments->ld_out : a->rows) * 2;
  emulator::run_grid(ctas, stoker::FEW_THREADS, seed, [=] { kernel(*arguments); });
}

extern "C" int arguments_size() { return sizeof(stoker::PackedArguments); }
