// The warpgroup of `sm90_latent` that brings the keys of a cache in e4m3: half a tile rests in its registers, asked for
// while the one before is multiplied, and is widened into its buffer as soon as that is free. The tiles behind it are on
// their way to L2 (a whole tile in registers leaves the consumers too few).
#pragma once
#include "latent_producer.cuh"

namespace stoker {

// Bytes of rows of RANK + 64, and what one of them is in units of.
struct ByteCache {
  const unsigned char* bytes;
  const float* scale;
};

constexpr int ROW_BYTES = RANK + 64, THREAD_KEYS = 2;

// Where this thread's keys of a tile lie, of which it takes 16 bytes of every chunk; in units of 16 bytes, of which a layer's
// cache has less than 2³². NOWHERE if a warp's eight are behind the item's last; of eight that are not, those behind it are
// read, and cleared by the consumers.
constexpr uint32_t NOWHERE = ~0u;
struct TileKeys {
  uint32_t at[THREAD_KEYS];

  __device__ __forceinline__ void find(const LatentArguments& g, const Work& work, PageWindow& pages, int from, int warp,
                                       int lane) {
    const int box_shift = min(g.page_shift, 6), box = (from - work.start) >> box_shift;
    if (box + (TILE_KEYS >> box_shift) > pages.cached + 32) pages.load(g, work.slot, work.start, work.end, box, lane);
#pragma unroll
    for (int i = 0; i < THREAD_KEYS; ++i) {
      const int eight = warp * 8 + i * 32, key = from + eight + lane / 4;
      const int page = __shfl_sync(~0u, pages.page, box + (eight >> box_shift) - pages.cached);
      const uint32_t row = page * g.page_rows + (key & ((1 << g.page_shift) - 1));
      at[i] = from + eight < work.end ? row * (ROW_BYTES / 16) + lane % 4 : NOWHERE;
    }
  }
};

// A tile behind those that are asked for, on its way to L2; not past the pages that are at hand.
__device__ __forceinline__ void prefetch_tile(const ByteCache& cache, const LatentArguments& g, const Work& work,
                                              const PageWindow& pages, int from, int lane) {
  const int box_shift = min(g.page_shift, 6), at = ((from - work.start) >> box_shift) + lane - pages.cached;
  const int page = __shfl_sync(~0u, pages.page, at), key = from + (lane << box_shift);
  if (lane < TILE_KEYS >> box_shift && at < 32 && key < work.end) {
    const int row = page * g.page_rows + (key & ((1 << g.page_shift) - 1));
    prefetch_l2(cache.bytes + static_cast<int64_t>(row) * ROW_BYTES, ROW_BYTES << box_shift);
  }
}

// A thread's part of a half of a tile: chunks from `first` on. The later half has a fifth, the rotated part.
struct HalfTile {
  uint4 part[HALF_CHUNKS + 1][THREAD_KEYS];

  static __device__ __forceinline__ int chunk_of(int first, int i) { return i < HALF_CHUNKS ? first + i : VALUE_CHUNKS; }

  template <bool early>
  __device__ __forceinline__ void load(const ByteCache& cache, const TileKeys& keys, int first) {
#pragma unroll
    for (int k = 0; k < THREAD_KEYS; ++k) {
      const bool there = keys.at[k] != NOWHERE;
      const unsigned char* from = cache.bytes + keys.at[k] * int64_t{16};
#pragma unroll
      for (int i = 0; i < (early ? HALF_CHUNKS : HALF_CHUNKS + 1); ++i) {
        part[i][k] = there ? load_once_16(from + chunk_of(first, i) * 64) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Writes it to a buffer that is free, in the layout of TMA's 128-byte swizzle, and says so.
  template <bool early>
  __device__ __forceinline__ void widen(const LatentRing& ring, int buffer, int first, int warp, int lane) const {
    unsigned char* own = ring.keys_memory(buffer) + warp * 1024 + lane / 4 * 128;
    const int place = (lane % 4 * 2 ^ lane / 4) << 4;
#pragma unroll
    for (int i = 0; i < (early ? HALF_CHUNKS : HALF_CHUNKS + 1); ++i) {
#pragma unroll
      for (int k = 0; k < THREAD_KEYS; ++k) {
        const uint4 x = part[i][k];
        uint4 y[2];
        unpack_e4m3(x.x, y[0].x, y[0].y);
        unpack_e4m3(x.y, y[0].z, y[0].w);
        unpack_e4m3(x.z, y[1].x, y[1].y);
        unpack_e4m3(x.w, y[1].z, y[1].w);
        unsigned char* to = own + chunk_of(first, i) * CHUNK_BYTES + k * 4096;
        *reinterpret_cast<uint4*>(to + place) = y[0];
        *reinterpret_cast<uint4*>(to + (place ^ 16)) = y[1];
      }
    }
    proxy_fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.full(buffer, early));
  }
};

template <typename WorkList>
__device__ __forceinline__ void latent_widen(const CUtensorMap& q_map, const CUtensorMap& turned_map, const ByteCache& cache,
                                             const LatentArguments& g, const LatentRing& ring, int warp, int lane) {
  grid_dependency_wait();
  proxy_fence_async_global();
  WorkList list(g, blockIdx.x / g.head_tiles);
  uint32_t parity = 7;  // a bit per buffer, and the queries'
  for (bool more = true; more;) {
    Work work{};
    more = list.next(g, work, lane);
    PageWindow pages;
    TileKeys keys;
    HalfTile half;
    if (work.start < work.end) {
      pages.load(g, work.slot, work.start, work.end, 0, lane);
      keys.find(g, work, pages, work.start, warp, lane);
      half.load<true>(cache, keys, 0);
      if (WorkList::prefetched && warp == 1) prefetch_tile(cache, g, work, pages, work.start + TILE_KEYS, lane);
    }
    if (warp == 0) {
      const int first_head = blockIdx.x % g.head_tiles * g.group, q_rows = TILE_HEADS / g.group * g.group;
      mbarrier_wait(ring.q_empty(), parity >> BUFFERS & 1);
      parity ^= 1u << BUFFERS;
      announce(q_map, turned_map, ring, work, first_head, q_rows, !more, lane);
    }
    int buffer = 0;
    for (int from = work.start; from < work.end; from += TILE_KEYS, buffer ^= 1) {
      const int own = buffer * HALF_CHUNKS, other = HALF_CHUNKS - own;
      mbarrier_wait(ring.empty(buffer, true), parity >> buffer & 1);
      half.widen<true>(ring, buffer, own, warp, lane);
      half.load<false>(cache, keys, other);
      if (WorkList::prefetched && warp == 1) prefetch_tile(cache, g, work, pages, from + 2 * TILE_KEYS, lane);
      mbarrier_wait(ring.empty(buffer, false), parity >> buffer & 1);
      half.widen<false>(ring, buffer, other, warp, lane);
      parity ^= 1u << buffer;
      if (from + TILE_KEYS < work.end) {
        keys.find(g, work, pages, from + TILE_KEYS, warp, lane);
        half.load<true>(cache, keys, other);  // the next tile's own half
      }
    }
  }
}

}  // namespace stoker
