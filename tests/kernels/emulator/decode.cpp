// Entry of the decode kernels for the tests. The kernel before writes the queries and the keys and values of this step.
#include "sm90_decode.cuh"

extern "C" void decode(int e4m3, int ctas, int seed, const CUtensorMap* k_map, const CUtensorMap* v_map,
                       const stoker::DecodeArguments* g, const emulator::Region* written, int regions, int64_t out_bytes) {
  emulator::predecessor.writes.assign(written, written + regions);
  emulator::predecessor.out = reinterpret_cast<const unsigned char*>(g->out), emulator::predecessor.out_bytes = out_bytes;
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
