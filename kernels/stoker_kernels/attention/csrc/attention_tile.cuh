// A tile of prefill queries in the ring of sm90_decode: 64 rows, ⌊64 / group⌋ tokens times the query heads of one KV
// head, against units of 64 keys, from the first that its first token sees to the last that its last one does
// (FlashAttention-2, Dao 2023). The four consumer warps are a warpgroup: queries and weights are its operands from
// registers, keys and values those from shared memory, where units of e4m3 go through a copy in f16 first.
#pragma once
#include "decode_fragments.cuh"
#include "tile_softmax.cuh"
#include "wgmma.cuh"

namespace stoker {

constexpr int TILE_ROWS = 64;
constexpr int TILE_INTS = 8;
constexpr int MAX_TILES = 4096;  // that a plan has room for
constexpr int UNIT_HALF_BYTES = UNIT * 128;  // 64 dimensions of 64 keys, two bytes each
constexpr int WIDE_UNIT_BYTES = 4 * UNIT_HALF_BYTES;

// What a tile's products are of.
template <typename Cache>
struct TileElement;
template <>
struct TileElement<bf16_cache> {
  using type = __nv_bfloat16;
  static constexpr int staging_bytes = 0;
  static __device__ __forceinline__ uint32_t query(uint32_t pair) { return pair; }
};
template <>
struct TileElement<e4m3_cache> {
  using type = __half;
  static constexpr int staging_bytes = WIDE_UNIT_BYTES;  // keys and values of a unit
  static __device__ __forceinline__ uint32_t query(uint32_t pair) { return Fragments<e4m3_cache>::f16_from_bf16(pair); }
};

// Keys that lie behind the window of a row. `limit` is the last that it sees.
__device__ __forceinline__ void mask_window(float (&s)[32], const RowState& a, int from, int window, int lane) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int key = from + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (key <= a.limit[i / 2 % 2] - window) s[i] = -INFINITY;
  }
}

// Makes a unit's values from `valid` on zeros: what is there may be NaN, and 0 · NaN is NaN.
__device__ __forceinline__ void clear_values_from(unsigned char* v, int valid, int thread) {
#pragma unroll 1
  for (int i = valid * 16 + thread; i < UNIT * 16; i += CONSUMER_THREADS) {
    *reinterpret_cast<uint4*>(v + i % 16 / 8 * UNIT_HALF_BYTES + i / 16 * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
}

// Unpacks keys and values of a unit, in the layout of bf16 units; those from `valid` on are zeros.
__device__ __forceinline__ void widen_unit(const unsigned char* unit, unsigned char* wide, int valid, int thread) {
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    // Neighbouring threads have neighbouring keys: their chunks are swizzled to different banks.
    const int key = thread % UNIT, chunk = thread / UNIT + i % 4 * 2, which = i / 4;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (key < valid) {
      x = *reinterpret_cast<const uint4*>(unit + which * (UNIT * 128) + key * 128 + ((chunk ^ (key & 7)) << 4));
    }
    uint4 y[2];
    unpack_e4m3(x.x, y[0].x, y[0].y);
    unpack_e4m3(x.y, y[0].z, y[0].w);
    unpack_e4m3(x.z, y[1].x, y[1].y);
    unpack_e4m3(x.w, y[1].z, y[1].w);
    unsigned char* to = wide + (2 * which + chunk / 4) * UNIT_HALF_BYTES + key * 128;
#pragma unroll
    for (int j = 0; j < 2; ++j) *reinterpret_cast<uint4*>(to + (((chunk % 4 * 2 + j) ^ (key & 7)) << 4)) = y[j];
  }
}

// How the consumers take a tile from the ring. The staging memory lies right before the ring's.
template <typename Cache>
struct TileConsumer {
  using Element = TileElement<Cache>;
  using T = typename Element::type;
  static constexpr bool any = true;
  const DecodeArguments& g;
  const DecodeRing<Cache>& ring;
  const int warp, lane;

  // `h` is the header of the tile, which has a stage of its own: row is its first token, valid how many it has, low the
  // first one's position, share the row's keys, and its units are first_share to last_share (excluded).
  __device__ __forceinline__ void take(const Header& h, int& stage, uint32_t& parity) const {
    const int thread = warp * 32 + lane;
    release(stage, parity);
    RowState a;
    uint32_t q[8][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp * 16 + lane / 4 + 8 * r, token = row / g.group, head = h.head * g.group + row % g.group;
      const bool real = token < h.valid;
      a.m[r] = -INFINITY, a.l[r] = 0.0f, a.limit[r] = h.low + token;
      const int64_t at = static_cast<int64_t>(h.row + token) * g.q_stride + head * HEAD_DIM + lane % 4 * 2;
      const int* from = reinterpret_cast<const int*>(g.q + at);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        q[i / 2][i % 2 * 2 + r] = real ? Element::query(static_cast<uint32_t>(load_int(from + 4 * i))) : 0;
      }
    }
    const float scale = g.k_scale != nullptr ? g.scale_log2 * g.k_scale[h.head] : g.scale_log2;
    float o[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    for (int unit = h.first_share; unit < h.last_share; ++unit) {
      mbarrier_wait(ring.full + 8 * stage, parity);
      const int from = unit * UNIT, valid = h.share - from;
      unsigned char* data = ring.data + stage * DecodeRing<Cache>::stage_bytes;
      uint32_t keys = ring.data_address + stage * DecodeRing<Cache>::stage_bytes;
      if constexpr (Element::staging_bytes > 0) {
        named_barrier(1, CONSUMER_THREADS);  // every warp is done with the unit before
        widen_unit(data, ring.data - Element::staging_bytes, valid, thread);
        proxy_fence_async_shared();
        named_barrier(1, CONSUMER_THREADS);
        release(stage, parity);
        keys = ring.data_address - Element::staging_bytes;
      } else if (valid < UNIT) {
        clear_values_from(data + DecodeRing<Cache>::tile_bytes, valid, thread);
        proxy_fence_async_shared();
        named_barrier(1, CONSUMER_THREADS);
      }
      float s[32], alpha[2];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t at = keys + i / 4 * UNIT_HALF_BYTES + i % 4 * 32;
        WgmmaRegisters<T, 64, false>::multiply(s, q[i], wgmma_descriptor(at), i != 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_results(s);
      if (from + UNIT - 1 > h.low) mask_keys(s, a, from, lane);
      if (g.window > 0) mask_window(s, a, from, g.window, lane);
      softmax(s, a, alpha, scale);
      rescale(o, alpha);
      uint32_t p[4][4];
      pack_weights<Fragments<Cache>::pack>(p, s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = keys + 2 * UNIT_HALF_BYTES + i * 2048;
        WgmmaRegisters<T, 128, true>::multiply(o, p[i], wgmma_descriptor_columns(at, UNIT_HALF_BYTES), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_results(o);
      if constexpr (Element::staging_bytes == 0) release(stage, parity);
    }
    write(h, a, o, scale);
  }

  __device__ __forceinline__ void release(int& stage, uint32_t& parity) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
    if (++stage == g.stages) stage = 0, parity ^= 1;
  }

  // `scale` turns the rows' maxima into powers of two.
  __device__ __forceinline__ void write(const Header& h, const RowState& a, const float (&o)[64], float scale) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = a.limit[r] - h.low, head = h.head * g.group + (warp * 16 + lane / 4 + 8 * r) - token * g.group;
      float sum = a.l[r], factor = g.v_scale != nullptr ? g.v_scale[h.head] : 1.0f;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (token >= h.valid) continue;
      if (g.sinks != nullptr) {
        const float m = a.m[r] == -INFINITY ? a.m[r] : a.m[r] * scale, sink = g.sinks[head] * LOG2E;
        const float top = fmaxf(m, sink), kept = exp2_approx(m - top);
        sum = sum * kept + exp2_approx(sink - top);
        factor *= kept;
      }
      factor = sum > 0.0f ? factor / sum : 0.0f;
      __nv_bfloat16* to = g.out + static_cast<int64_t>(h.row + token) * g.out_stride + head * HEAD_DIM + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t pair = pack_bf16(o[4 * i + 2 * r] * factor, o[4 * i + 2 * r + 1] * factor);
        *reinterpret_cast<uint32_t*>(to + 8 * i) = pair;
      }
    }
  }
};

}  // namespace stoker
