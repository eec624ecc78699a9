// Entry of the kernel that chooses experts and sorts by them for the tests. The kernel before it writes logits, and may
// still read what it writes.
#include "sm90_route.cuh"

extern "C" void route(int threads, int seed, const stoker::RouteArguments* a) {
  const stoker::FewArguments& choice = a->choice;
  auto& before = emulator::predecessor;
  const int64_t bytes = (static_cast<int64_t>(choice.tokens - 1) * choice.ld_logits + choice.experts) * 2;
  before.writes = {emulator::Region{const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(choice.logits)), bytes}};
  before.out = reinterpret_cast<const unsigned char*>(a->ids);
  before.out_bytes = static_cast<int64_t>(choice.tokens) * choice.top_k * 4;
  emulator::run_grid(1, threads, seed, [=] { stoker::sm90_route(*a, threads); });
}

extern "C" int arguments_size() { return sizeof(stoker::RouteArguments); }
