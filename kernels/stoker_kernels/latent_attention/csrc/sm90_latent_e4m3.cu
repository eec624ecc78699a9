// bf16 queries, a cache in e4m3; see sm90_latent.cuh. What it leaves in pieces sm90_latent.cu's kernels add up.
#include "sm90_latent.cuh"

extern "C" __global__ void __launch_bounds__(stoker::LATENT_THREADS, 1)
    sm90_e4m3_latent(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap turned_map,
                     const __grid_constant__ stoker::ByteCache cache, const __grid_constant__ stoker::LatentArguments g) {
  stoker::sm90_latent<stoker::e4m3_latents, stoker::PlannedWork>(q_map, turned_map, cache, g);
}

extern "C" __global__ void __launch_bounds__(stoker::LATENT_THREADS, 1)
    sm90_e4m3_latent_context(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap turned_map,
                             const __grid_constant__ stoker::ByteCache cache,
                             const __grid_constant__ stoker::LatentArguments g) {
  stoker::sm90_latent<stoker::e4m3_latents, stoker::ChunkWork>(q_map, turned_map, cache, g);
}
