// Entry of the kernels of experts for many tokens for the tests. The kernel before gate-up writes x and the plan, the one
// before down its rows, and both may still read what these write.
#include "sm90_grouped_experts.cuh"

struct Before {  // x, and bytes of it and of what is written
  unsigned char* x;
  int64_t x_bytes, out_bytes, order_bytes;
};

using Kernel = void (*)(const CUtensorMap&, const CUtensorMap&, const stoker::GroupedArguments&);

template <bool gated>
Kernel kernel_of(int kind) {
  using stoker::GroupedKind;
  if (kind == 0) return stoker::sm90_grouped_experts<GroupedKind::BF16, gated>;
  if (kind == 1) return stoker::sm90_grouped_experts<GroupedKind::CHANNEL, gated>;
  return stoker::sm90_grouped_experts<GroupedKind::BLOCK, gated>;
}

extern "C" void grouped_experts(int kind, int gated, int ctas, int seed, const CUtensorMap* w_map,
                                const CUtensorMap* x_map, const stoker::GroupedArguments* a, const Before* memory) {
  const Kernel kernel = gated ? kernel_of<true>(kind) : kernel_of<false>(kind);
  const auto region = [](const void* at, int64_t bytes) {
    return emulator::Region{const_cast<unsigned char*>(static_cast<const unsigned char*>(at)), bytes};
  };
  auto& before = emulator::predecessor;
  before.writes = {region(memory->x, memory->x_bytes)};
  if (gated) {
    before.writes.push_back(region(a->order, memory->order_bytes));
    before.writes.push_back(region(a->tiles, a->num_tiles * 12));
  }
  before.out = reinterpret_cast<const unsigned char*>(a->out);
  before.out_bytes = memory->out_bytes;
  emulator::run_grid(ctas, stoker::GROUPED_THREADS, seed, [=] { kernel(*w_map, *x_map, *a); });
}

extern "C" int arguments_size() { return sizeof(stoker::GroupedArguments); }
