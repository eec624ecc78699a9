// Decode attention over a paged cache, bound by the bytes of K and V: one query token per row, head dimension 128, up to
// 8 query heads per KV head, bf16 queries, a bf16 or e4m3 cache.
//
// A *stream* is one (row, KV head); a *unit* is 64 of its keys. All units in a line, row by row and head by head, are
// cut into equal shares, one per CTA, so that every SM moves the same bytes; where streams are short, shares keep them
// whole, and an eighth of all is left to CTAs that are done early (share_plan.py plans both). In a CTA, one
// producer warp streams units by TMA into a ring. Of each unit, each of four consumer warps weighs 16 keys, and hands
// their weights to the others; then each adds up 32 dimensions of all 64 values. So a stream's end has nothing to merge:
// it costs a division and a store. A stream in several shares leaves partial results, which the CTA that arrives
// last adds up in the order of the keys; a CTA arrives once a share, at its end.
//
// Keys are the M side of both products, heads the N side (8): Sᵀ = K·Qᵀ, Oᵀ = Vᵀ·Pᵀ. No row of an mma is wasted on
// padding a GQA group, and K and V go from shared memory to fragments without a transposition in registers.
//
// In a step whose plan and page table are settled (complete before this kernel can start), the producer fills the ring
// before the wait for the previous kernel: keys of earlier steps are in the cache. What the token of this step is part
// of, and the queries, follow after the wait.
#pragma once
#include "decode_consumers.cuh"
#include "decode_producer.cuh"

namespace stoker {

template <typename Cache>
__device__ __forceinline__ void sm90_decode(const CUtensorMap& k_map, const CUtensorMap& v_map,
                                            const DecodeArguments& g) {
  extern __shared__ unsigned char raw[];
  const DecodeRing<Cache> ring(raw, g.stages, g.group);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  start_ring(ring, k_map, v_map, g.stages);
  launch_dependents();
  if (warp == CONSUMERS) {
    Producer<Cache>{k_map, v_map, g, ring, lane}.run();
  } else {
    consume(g, ring, NoTiles{}, warp, lane);
  }
}

}  // namespace stoker

#define STOKER_SM90_DECODE(NAME, CACHE)                                                                           \
  extern "C" __global__ void __launch_bounds__(stoker::CONSUMER_THREADS + 32, 3)                                  \
      NAME(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,                  \
           const __grid_constant__ stoker::DecodeArguments g) {                                                   \
    stoker::sm90_decode<CACHE>(k_map, v_map, g);                                                                  \
  }
