// Entry of the mixed kernels for the tests. The kernel before writes the queries and the keys and values of this step.
#include "sm90_mixed.cuh"

extern "C" void mixed(int e4m3, int ctas, int seed, const CUtensorMap* k_map, const CUtensorMap* v_map,
                      const stoker::MixedArguments* m, const emulator::Region* written, int regions, int64_t out_bytes) {
  emulator::predecessor.writes.assign(written, written + regions);
  emulator::predecessor.out = reinterpret_cast<const unsigned char*>(m->decode.out);
  emulator::predecessor.out_bytes = out_bytes;
  const int threads = stoker::CONSUMER_THREADS + 32;
  emulator::run_grid(ctas, threads, seed, [=] {
    if (e4m3) {
      stoker::sm90_mixed<stoker::e4m3_cache>(*k_map, *v_map, *m);
    } else {
      stoker::sm90_mixed<stoker::bf16_cache>(*k_map, *v_map, *m);
    }
  });
}

extern "C" int arguments_size() { return sizeof(stoker::MixedArguments); }
extern "C" int staging_bytes() { return stoker::TileElement<stoker::e4m3_cache>::staging_bytes; }
extern "C" int tile_rows() { return stoker::TILE_ROWS; }
extern "C" int max_tiles() { return stoker::MAX_TILES; }
