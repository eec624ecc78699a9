// Attention on latents as they are cached: 64 queries in bf16, heads of a token or of a few, against keys of 512 + 64
// dimensions, of which the 512 are the values too.
//
// A CTA takes one tile of heads and a part of the step's keys, as planned (triton_plan.py), or tiles of a chunk's tokens
// and all of their context. One warp brings queries and
// tiles of 64 keys by TMA, two tiles ahead; two warpgroups multiply. The sums are too many for one warpgroup's registers,
// so each has half of their columns, and every other tile's logits and softmax, which run under the other one's products
// (FlashMLA, DeepSeek 2025: two warpgroups in turns). Weights lie where the rotated part of their keys was, which is done
// with by then: a buffer holds all that one tile needs, and is free when both warpgroups have multiplied its values.
// The CTAs of a row's tiles of heads may be a cluster; each then reads a share of every tile of keys for all.
// Of a cache in e4m3 a warpgroup reads tiles into its registers and widens them to f16 (latent_widen.cuh); no cluster.
#pragma once
#include "latent_combine.cuh"
#include "latent_consumers.cuh"
#include "latent_widen.cuh"

namespace stoker {

// `cache`: a tensor map of bf16_latents, the ByteCache of e4m3_latents.
template <typename Latents, typename WorkList, typename Cache>
__device__ __forceinline__ void sm90_latent(const CUtensorMap& q_map, const CUtensorMap& turned_map, const Cache& cache,
                                            const LatentArguments& g) {
  extern __shared__ unsigned char raw[];
  const LatentRing ring(raw, Latents::widened);
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&q_map);
    tensor_map_prefetch(&turned_map);
    if constexpr (!Latents::widened) tensor_map_prefetch(&cache);
    ring.initialise(Latents::full_arrivals);
  }
  __syncthreads();
  launch_dependents();
  if (ring.ctas > 1) cluster_arrive(), cluster_wait();  // every CTA has set up its barriers
  const int role = threadIdx.x / WARPGROUP;
  const float* scale = nullptr;
  if constexpr (Latents::widened) scale = cache.scale;
  if (role == 0) {
    registers_decrease<Latents::producer_registers>();
    if constexpr (Latents::widened) {
      latent_widen<WorkList>(q_map, turned_map, cache, g, ring, threadIdx.x / 32, threadIdx.x % 32);
    } else if (threadIdx.x < 32) {
      latent_produce<WorkList>(q_map, turned_map, cache, g, ring, threadIdx.x);
    }
  } else if (role == 1) {
    registers_increase<Latents::consumer_registers>();
    latent_consume<Latents, 0>(g, ring, scale);
  } else {
    registers_increase<Latents::consumer_registers>();
    latent_consume<Latents, 1>(g, ring, scale);
  }
}

}  // namespace stoker
