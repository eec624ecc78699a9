// Entry of the decode kernels for the tests.
#include "sm90_decode.cuh"

extern "C" void decode(int e4m3, int ctas, int seed, const CUtensorMap* k_map, const CUtensorMap* v_map,
                       const stoker::DecodeArguments* g) {
  const int threads = stoker::CONSUMER_THREADS + 32;
  emulator::run_grid(ctas, threads, seed, [=] {
    if (e4m3) {
      stoker::sm90_decode<stoker::e4m3_cache>(*k_map, *v_map, *g);
    } else {
      stoker::sm90_decode<stoker::bf16_cache>(*k_map, *v_map, *g);
    }
  });
}

extern "C" int arguments_size() { return sizeof(stoker::DecodeArguments); }
