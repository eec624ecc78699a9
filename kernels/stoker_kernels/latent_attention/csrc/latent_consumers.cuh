// The two warpgroups of `sm90_latent` that multiply: each has half of the sums, and every other tile's softmax.
#pragma once
#include "latent_ring.cuh"
#include "tile_softmax.cuh"

namespace stoker {

constexpr int OWN_SUMS = TILE_HEADS * RANK / 2 / WARPGROUP;  // of a thread

// A warpgroup's sums and the state of their 64 rows. The sums are weighed by exp2 of logits less `rows.m`.
struct Sums {
  float o[OWN_SUMS];
  RowState rows;
};

// Factors are 1 from the first tiles on, mostly. Where they are not, the compiler puts a wait before the sums change (it
// says so), for the logits that are under way.
__device__ __forceinline__ void shrink(Sums& a, const float (&alpha)[2]) {
  if (!__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < OWN_SUMS; ++i) a.o[i] *= alpha[i / 2 % 2];
}

// Rows of values that hold no key of the item may hold anything: 0 · NaN is NaN.
__device__ __forceinline__ void clear_values(unsigned char* keys, int first, int thread) {
  for (int i = first * 8 + thread; i < TILE_KEYS * 8; i += WARPGROUP) {
#pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
      *reinterpret_cast<uint4*>(keys + chunk * CHUNK_BYTES + i * 16) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Logits of a tile by half of its keys' dimensions: the `early` half, then the other one, as they arrive.
template <typename Latents, int group, bool early>
__device__ __forceinline__ void multiply_half(float (&s)[32], const LatentRing& ring, uint32_t parity) {
  mbarrier_wait(ring.full(group, early), parity);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < (early ? HALF_CHUNKS : HALF_CHUNKS + 1) * 4; ++step) {
    const int chunk = step / 4 < HALF_CHUNKS ? (early ? group : 1 - group) * HALF_CHUNKS + step / 4 : VALUE_CHUNKS;
    const uint32_t offset = chunk * CHUNK_BYTES + step % 4 * 32;
    Wgmma<typename Latents::Element, 64>::multiply(s, wgmma_descriptor(ring.q_address + offset),
                                                   wgmma_descriptor(ring.keys(group) + offset), !early || step != 0);
  }
  wgmma_commit();
}

// Weights and greatest logits, for the other warpgroup.
__device__ __forceinline__ void leave_weights(const uint32_t (&p)[4][4], const RowState& rows, const LatentRing& ring,
                                              int buffer, int warp, int lane) {
  unsigned char* weights = ring.keys_memory(buffer) + VALUE_CHUNKS * CHUNK_BYTES;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = warp * 16 + lane / 4 + i % 2 * 8;
    *reinterpret_cast<uint32_t*>(weights + row * 128 + ((i / 2 ^ row % 8) << 4) + lane % 4 * 4) = p[i / 4][i % 4];
  }
  if (lane % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) ring.greatest[buffer * TILE_HEADS + warp * 16 + lane / 4 + r * 8] = rows.m[r];
  }
  proxy_fence_async_shared();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(ring.weights(buffer));
}

// A tile of this warpgroup's, the early half of whose logits is under way: its values, and its weights for the other one,
// left where the keys' rotated part was. `last`: no logits of the item follow.
template <typename Latents, int group>
__device__ __forceinline__ void attend_own(Sums& a, float (&s)[32], const LatentArguments& g, const LatentRing& ring,
                                           float cache_scale, uint32_t parity, int valid, bool last, int warp, int lane) {
  constexpr int buffer = group;
  float alpha[2];
  multiply_half<Latents, group, false>(s, ring, parity);
  wgmma_wait<0>();
  wgmma_results(s);
  if (last && lane == 0) mbarrier_arrive(ring.q_empty());
  if (valid < TILE_KEYS) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) s[i] = -INFINITY;
    }
  }
  softmax(s, a.rows, alpha, Latents::scale_log2(g, cache_scale));
  uint32_t p[4][4];
  pack_weights<Latents::pack>(p, s);
  named_barrier(1 + group, WARPGROUP);  // no warp reads the rotated part any more
  if (valid < TILE_KEYS) {
    clear_values(ring.keys_memory(buffer), valid, warp * 32 + lane);
    proxy_fence_async_shared();
    named_barrier(1 + group, WARPGROUP);
  }
  shrink(a, alpha);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t values = ring.keys(buffer) + group * HALF_CHUNKS * CHUNK_BYTES + step * 2048;
    WgmmaRegisters<typename Latents::Element, 256, true>::multiply(a.o, p[step],
                                                                   wgmma_descriptor_columns(values, CHUNK_BYTES), true);
  }
  wgmma_commit();
  leave_weights(p, a.rows, ring, buffer, warp, lane);
  wgmma_wait<0>();
  wgmma_results(a.o);
  ring.release(buffer, true, lane);
}

// A tile of the other warpgroup's: this one's half of its values, by the weights that the other has left.
template <typename Latents, int group>
__device__ __forceinline__ void attend_other(Sums& a, const LatentArguments& g, const LatentRing& ring, float cache_scale,
                                             uint32_t parity, int warp, int lane) {
  constexpr int buffer = 1 - group;
  mbarrier_wait(ring.weights(buffer), parity);
  mbarrier_wait(ring.full(buffer, false), parity);  // the other half may be a later tile's by now
  float alpha[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m = ring.greatest[buffer * TILE_HEADS + warp * 16 + lane / 4 + r * 8];
    alpha[r] = exp2_approx((a.rows.m[r] - m) * Latents::scale_log2(g, cache_scale));
    a.rows.m[r] = m;
    a.rows.l[r] *= alpha[r];
  }
  shrink(a, alpha);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t weights = ring.keys(buffer) + VALUE_CHUNKS * CHUNK_BYTES + step * 32;
    const uint32_t values = ring.keys(buffer) + group * HALF_CHUNKS * CHUNK_BYTES + step * 2048;
    WgmmaColumns<typename Latents::Element, 256>::multiply(a.o, wgmma_descriptor(weights),
                                                           wgmma_descriptor_columns(values, CHUNK_BYTES), true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_results(a.o);
  ring.release(buffer, false, lane);
}

// Of four blocks of eight columns a quad's lanes hold two columns each: gives lane q all eight of block q.
__device__ __forceinline__ uint4 whole_block(const uint32_t (&pairs)[4], int q) {
  uint32_t from[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t even = q & 2 ? pairs[2 ^ step] : pairs[step], odd = q & 2 ? pairs[3 ^ step] : pairs[1 ^ step];
    from[step] = __shfl_xor_sync(~0u, q & 1 ? odd : even, step);  // what lane q ^ step has of block q
  }
  const uint32_t a = q & 1 ? from[1] : from[0], b = q & 1 ? from[0] : from[1];
  const uint32_t c = q & 1 ? from[3] : from[2], d = q & 1 ? from[2] : from[3];
  return q & 2 ? make_uint4(c, d, a, b) : make_uint4(a, b, c, d);
}

// Writes the item's rows of this warpgroup's columns, as they are or for `sm90_latent_combine`.
template <typename Latents, int group>
__device__ __forceinline__ void write_item(const Sums& a, const LatentArguments& g, const Item& item,
                                           const float (&sum)[2], float cache_scale, int warp, int lane) {
  const int q = lane % 4, by_group = (65536 + g.group - 1) / g.group;  // exact for rows below 64
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8, token = row * by_group >> 16;
    const int head = item.first_head + row - token * g.group;
    const bool real = head < g.heads && token < item.tokens;
    const float inverse = sum[r] > 0.0f ? Latents::value_scale(cache_scale) / sum[r] : 0.0f;
    const int64_t at = static_cast<int64_t>(item.place < 0 ? item.token + token : item.place) * g.heads + head;
    const int64_t column = at * RANK + group * (RANK / 2);
    if (item.place < 0) {
#pragma unroll
      for (int i = 0; i < OWN_SUMS / 4; i += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pairs[k] = pack_bf16(a.o[4 * (i + k) + 2 * r] * inverse, a.o[4 * (i + k) + 2 * r + 1] * inverse);
        }
        const uint4 block = whole_block(pairs, q);
        if (real) *reinterpret_cast<uint4*>(g.out + column + (i + q) * 8) = block;
      }
    } else {
#pragma unroll
      for (int i = 0; i < OWN_SUMS / 4; i += 2) {
        // Even lanes take four columns of the first block, odd ones of the second.
        const float x0 = a.o[4 * i + 2 * r], x1 = a.o[4 * i + 2 * r + 1];
        const float y0 = a.o[4 * i + 4 + 2 * r], y1 = a.o[4 * i + 4 + 2 * r + 1];
        const float z0 = __shfl_xor_sync(~0u, q & 1 ? x0 : y0, 1), z1 = __shfl_xor_sync(~0u, q & 1 ? x1 : y1, 1);
        const float4 four = q & 1 ? make_float4(z0 * inverse, z1 * inverse, y0 * inverse, y1 * inverse)
                                  : make_float4(x0 * inverse, x1 * inverse, z0 * inverse, z1 * inverse);
        if (real) *reinterpret_cast<float4*>(g.partial + column + (i + (q & 1)) * 8 + (q & 2) * 2) = four;
      }
    }
    float* lse = item.place < 0 ? g.lse : g.partial_lse;
    if (lse != nullptr && real && group == 0 && q == 0) {
      lse[at] = a.rows.m[r] * Latents::scale_log2(g, cache_scale) + log2f(sum[r]);
    }
  }
}

// Queries of an item as f16, where they are. Both warpgroups together.
__device__ __forceinline__ void round_queries(const LatentRing& ring, int thread) {
#pragma unroll 6
  for (int i = 0; i < TILE_BYTES / 16 / (2 * WARPGROUP); ++i) {
    uint4* at = reinterpret_cast<uint4*>(ring.q) + i * 2 * WARPGROUP + thread;
    const uint4 x = *at;
    *at = make_uint4(pack_f16(bf16_low(x.x), bf16_high(x.x)), pack_f16(bf16_low(x.y), bf16_high(x.y)),
                     pack_f16(bf16_low(x.z), bf16_high(x.z)), pack_f16(bf16_low(x.w), bf16_high(x.w)));
  }
  proxy_fence_async_shared();
  named_barrier(4, 2 * WARPGROUP);
}

// `scale` is of a cache that is widened, else null.
template <typename Latents, int group>
__device__ __forceinline__ void latent_consume(const LatentArguments& g, const LatentRing& ring, const float* scale) {
  const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
  uint32_t q_parity = 0, parity = 0, other_parity = 0;
  grid_dependency_wait();
  float cache_scale = 1.0f;
  if constexpr (Latents::widened) cache_scale = load_float(scale);
  for (int turn = 0;; turn ^= 1) {
    mbarrier_wait(ring.q_full(), q_parity);
    q_parity ^= 1;
    const int4* header = reinterpret_cast<const int4*>(ring.header);
    const int4 x = header[0], y = header[1];
    const Item item{x.x, x.y, x.z, x.w, y.x, y.y};
    if (item.stop) return;
    __syncwarp();
    if constexpr (Latents::widened) {
      if (item.keys > 0) round_queries(ring, group * WARPGROUP + thread);
    }
    if (item.keys <= group * TILE_KEYS && lane == 0) mbarrier_arrive(ring.q_empty());  // no tile of its own
    Sums a;
#pragma unroll
    for (int i = 0; i < OWN_SUMS; ++i) a.o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) a.rows.m[r] = -INFINITY, a.rows.l[r] = 0.0f;
    int from = group * TILE_KEYS;
    if (group == 0 && item.keys > 0) {
      float s[32];
      multiply_half<Latents, group, true>(s, ring, parity);
      attend_own<Latents, group>(a, s, g, ring, cache_scale, parity, item.keys, item.keys <= 2 * TILE_KEYS, warp, lane);
      parity ^= 1;
      from = 2 * TILE_KEYS;
    }
    for (; from < item.keys; from += 2 * TILE_KEYS) {
      // Half of the next logits may be there before the other one's weights are.
      float s[32];
      multiply_half<Latents, group, true>(s, ring, parity);
      attend_other<Latents, group>(a, g, ring, cache_scale, other_parity, warp, lane);
      other_parity ^= 1;
      const bool last = from + 2 * TILE_KEYS >= item.keys;
      attend_own<Latents, group>(a, s, g, ring, cache_scale, parity, item.keys - from, last, warp, lane);
      parity ^= 1;
    }
    if (from - TILE_KEYS < item.keys && from > 0) {  // the item ends with a tile of the other one's
      attend_other<Latents, group>(a, g, ring, cache_scale, other_parity, warp, lane);
      other_parity ^= 1;
    }
    // Each has the weights of its own tiles; the sums of two items lie apart, for a warp may be an item ahead.
    float* sums = ring.sums + turn * 2 * TILE_HEADS;
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = a.rows.l[r];
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (lane % 4 == 0) sums[group * TILE_HEADS + warp * 16 + lane / 4 + r * 8] = sum[r];
    }
    named_barrier(3, 2 * WARPGROUP);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + lane / 4 + r * 8;
      sum[r] = sums[row] + sums[TILE_HEADS + row];
    }
    write_item<Latents, group>(a, g, item, sum, cache_scale, warp, lane);
  }
}

}  // namespace stoker
