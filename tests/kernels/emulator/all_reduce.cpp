// Entry of the all-reduce kernels for the tests: one launch of one rank, all of whose CTAs run at once.
#include "sm90_all_reduce.cuh"

template <stoker::Way way>
static void run(int after, int ctas, int threads, int seed, const stoker::AllReduceArguments* a) {
  using stoker::After;
  void (*const kernels[3])(const stoker::AllReduceArguments&) = {stoker::sm90_all_reduce<way, After::NOTHING>,
                                                                 stoker::sm90_all_reduce<way, After::NORM>,
                                                                 stoker::sm90_all_reduce<way, After::NORM_E4M3>};
  const auto kernel = kernels[after];
  emulator::run_grid(ctas, threads, seed, [=] { kernel(*a); }, ctas);
}

extern "C" void all_reduce(int shots, int after, int ctas, int threads, int seed, const stoker::AllReduceArguments* a) {
  using stoker::Way;
  (shots == 1 ? run<Way::ONE_SHOT> : run<Way::TWO_SHOTS>)(after, ctas, threads, seed, a);
}
extern "C" void sum_copied(int after, int ctas, int threads, int seed, const stoker::AllReduceArguments* a) {
  run<stoker::Way::COPIED>(after, ctas, threads, seed, a);
}

extern "C" int arguments_size() { return sizeof(stoker::AllReduceArguments); }
extern "C" int state_bytes() { return sizeof(stoker::AllReduceState); }
extern "C" int shared_bytes() { return sizeof(stoker::AllReduceShared); }
extern "C" unsigned absent() { return stoker::ABSENT; }
