// bf16 queries and cache; see sm90_latent.cuh.
#include "sm90_latent.cuh"

extern "C" __global__ void __launch_bounds__(stoker::LATENT_THREADS, 1)
    sm90_bf16_latent(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap turned_map,
                     const __grid_constant__ CUtensorMap cache_map, const __grid_constant__ stoker::LatentArguments g) {
  stoker::sm90_latent<stoker::bf16_latents, stoker::PlannedWork>(q_map, turned_map, cache_map, g);
}

extern "C" __global__ void __launch_bounds__(stoker::LATENT_THREADS, 1)
    sm90_bf16_latent_context(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap turned_map,
                             const __grid_constant__ CUtensorMap cache_map,
                             const __grid_constant__ stoker::LatentArguments g) {
  stoker::sm90_latent<stoker::bf16_latents, stoker::ChunkWork>(q_map, turned_map, cache_map, g);
}

extern "C" __global__ void __launch_bounds__(stoker::COMBINE_THREADS)
    sm90_bf16_latent_combine_4(const __grid_constant__ stoker::LatentArguments g, int heads_each) {
  stoker::sm90_latent_combine<4>(g, heads_each);
}

extern "C" __global__ void __launch_bounds__(stoker::COMBINE_THREADS)
    sm90_bf16_latent_combine_16(const __grid_constant__ stoker::LatentArguments g, int heads_each) {
  stoker::sm90_latent_combine<16>(g, heads_each);
}
