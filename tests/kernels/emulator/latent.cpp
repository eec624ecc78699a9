// Entry of the latent kernels for the tests. The kernel before writes the queries. A cache in e4m3 has no map.
#include "sm90_latent.cuh"

template <typename Latents, typename Cache>
void attend(int of_chunks, const CUtensorMap& q_map, const CUtensorMap& turned_map, const Cache& cache,
            const stoker::LatentArguments& g) {
  if (of_chunks) {
    stoker::sm90_latent<Latents, stoker::ChunkWork>(q_map, turned_map, cache, g);
  } else {
    stoker::sm90_latent<Latents, stoker::PlannedWork>(q_map, turned_map, cache, g);
  }
}

extern "C" void latent(int of_chunks, int ctas, int cluster, int seed, const CUtensorMap* q_map, const CUtensorMap* turned_map,
                       const CUtensorMap* cache_map, const stoker::ByteCache* bytes, const stoker::LatentArguments* g,
                       const emulator::Region* written, int regions, int64_t out_bytes) {
  emulator::predecessor.writes.assign(written, written + regions);
  emulator::predecessor.out = reinterpret_cast<const unsigned char*>(g->out), emulator::predecessor.out_bytes = out_bytes;
  const auto kernel = [=] {
    if (bytes != nullptr) {
      attend<stoker::e4m3_latents>(of_chunks, *q_map, *turned_map, *bytes, *g);
    } else {
      attend<stoker::bf16_latents>(of_chunks, *q_map, *turned_map, *cache_map, *g);
    }
  };
  emulator::run_grid(ctas, stoker::LATENT_THREADS, seed, kernel, cluster);
}

extern "C" void combine(int summed, int ctas, int seed, const stoker::LatentArguments* g, int heads_each) {
  emulator::run_grid(ctas, stoker::COMBINE_THREADS, seed, [=] {
    summed == 4 ? stoker::sm90_latent_combine<4>(*g, heads_each) : stoker::sm90_latent_combine<16>(*g, heads_each);
  });
}

extern "C" int arguments_size() { return sizeof(stoker::LatentArguments); }
extern "C" int bytes_size() { return sizeof(stoker::ByteCache); }
extern "C" int shared_bytes() { return stoker::LATENT_SHARED; }
