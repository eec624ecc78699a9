// Entry of the all-reduce kernels for the tests: one launch of one rank, all of whose CTAs run at once.
#include "sm90_all_reduce.cuh"

extern "C" void all_reduce(int shots, int after, int ctas, int threads, int seed, const stoker::AllReduceArguments* a) {
  using stoker::After;
  void (*const kernels[2][3])(const stoker::AllReduceArguments&) = {
      {stoker::sm90_all_reduce<false, After::NOTHING>, stoker::sm90_all_reduce<false, After::NORM>,
       stoker::sm90_all_reduce<false, After::NORM_E4M3>},
      {stoker::sm90_all_reduce<true, After::NOTHING>, stoker::sm90_all_reduce<true, After::NORM>,
       stoker::sm90_all_reduce<true, After::NORM_E4M3>}};
  const auto kernel = kernels[shots - 1][after];
  emulator::run_grid(ctas, threads, seed, [=] { kernel(*a); }, ctas);
}

extern "C" int arguments_size() { return sizeof(stoker::AllReduceArguments); }
extern "C" int state_bytes() { return sizeof(stoker::AllReduceState); }
extern "C" int shared_bytes() { return sizeof(stoker::AllReduceShared); }
extern "C" unsigned absent() { return stoker::ABSENT; }
