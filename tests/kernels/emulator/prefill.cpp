// Entry of the prefill kernel for the tests.
#include "sm90_prefill.cuh"

extern "C" void prefill(int ctas, int seed, const CUtensorMap* q_map, const CUtensorMap* k_map,
                        const CUtensorMap* v_map, const stoker::PrefillArguments* g) {
  emulator::run_grid(ctas, stoker::PREFILL_THREADS, seed, [=] { stoker::sm90_prefill(*q_map, *k_map, *v_map, *g); });
}

extern "C" int arguments_size() { return sizeof(stoker::PrefillArguments); }
extern "C" int shared_bytes() { return stoker::PREFILL_SHARED; }
