// Entry of the sampling kernels for the tests.
#include "sm90_sample.cuh"

extern "C" void sample(int adjust, int rows, int cluster, int seed, const stoker::SampleArguments* a) {
  emulator::run_grid(
      rows * cluster, stoker::SAMPLE_THREADS, seed,
      [=] { adjust ? stoker::sm90_sample<true>(*a) : stoker::sm90_sample<false>(*a); }, cluster);
}

extern "C" int arguments_size() { return sizeof(stoker::SampleArguments); }
extern "C" int state_bytes() { return sizeof(stoker::SampleShared); }
extern "C" int threads() { return stoker::SAMPLE_THREADS; }
