// The warp of `sm90_latent` that brings queries and keys: those of the plan's items, or of a chunk's tokens and all that
// lies in pages before them.
#pragma once
#include "latent_ring.cuh"

namespace stoker {

// What is to be read for an item.
struct Work {
  int token, tokens, slot, start, end, place;
};

// The items of a part, one after the other.
struct PlannedWork {
  static constexpr bool prefetched = true;
  int index, last;

  __device__ PlannedWork(const LatentArguments& g, int part)
      : index(load_int(g.parts + part * ITEM_INTS)), last(load_int(g.parts + (part + 1) * ITEM_INTS)) {}

  __device__ __forceinline__ bool next(const LatentArguments& g, Work& work, int) {
    if (index == last) return false;
    const int4 x = load_int4(g.items + index * ITEM_INTS);
    work = {x.x, 1, x.y, x.z, x.w, load_int(g.items + index * ITEM_INTS + 5) > 1 ? index : -1};
    ++index;
    return true;
  }
};

// Tiles of the chunks' tokens, every gridDim / head_tiles-th of them. Row r of the chunks owns the tiles from
// ⌊start_r / tokens of a tile⌋ + r on, as in triton_absorbed.py; those without context are passed over.
struct ChunkWork {
  static constexpr bool prefetched = false;  // many tiles read the same keys
  int tile, first = 0, end = 0;  // the tiles of the row that was found
  int start = 0, query_end = 0, slot = 0, context = 0;

  __device__ ChunkWork(const LatentArguments&, int part) : tile(part) {}

  __device__ __forceinline__ int first_tile(const LatentArguments& g, int row) const {
    return (load_int(g.query_start + row) - g.first_token) / (TILE_HEADS / g.group) + row;
  }
  __device__ __forceinline__ void find_row(const LatentArguments& g, int lane) {
    int below = 0;
    for (int from = 0; from < g.rows; from += 32) {
      const int row = from + lane;
      below += __popc(__ballot_sync(~0u, row < g.rows && first_tile(g, min(row, g.rows - 1)) <= tile));
    }
    const int row = below - 1;
    first = first_tile(g, row), end = first_tile(g, row + 1);
    start = load_int(g.query_start + row), query_end = load_int(g.query_start + row + 1);
    slot = load_int(g.seq_slots + row);
    context = max(load_int(g.seq_lens + row) - (query_end - start), 0);
  }
  __device__ __forceinline__ bool next(const LatentArguments& g, Work& work, int lane) {
    const int parts = gridDim.x / g.head_tiles, last = first_tile(g, g.rows);
    while (tile < last) {
      if (tile >= end) find_row(g, lane);
      const int token = start + (tile - first) * (TILE_HEADS / g.group), tokens = min(query_end - token, TILE_HEADS / g.group);
      if (context > 0 && tokens > 0) {
        work = {token, tokens, slot, 0, context, -1};
        tile += parts;
        return true;
      }
      // To this CTA's first tile behind the row, or, where the row has context, behind the tile.
      tile += context > 0 ? parts : (end - tile + parts - 1) / parts * parts;
    }
    return false;
  }
};

// Says what the consumers do next, and asks for its queries, whose memory is free. `stop`: nothing.
__device__ __forceinline__ void announce(const CUtensorMap& q_map, const CUtensorMap& turned_map,
                                         const LatentRing& ring, const Work& work, int first_head, int q_rows, bool stop,
                                         int lane) {
  const int keys = work.end - work.start;
  if (lane == 0) {
    int4* header = reinterpret_cast<int4*>(ring.header);
    header[0] = make_int4(work.token, first_head, keys, work.place);
    header[1] = make_int4(work.tokens, stop, 0, 0);
    mbarrier_arrive_expect(ring.q_full(), keys > 0 ? q_rows * 128 * CHUNKS : 0);
  }
  __syncwarp();
  if (keys > 0 && lane < CHUNKS) {
    const uint32_t to = ring.q_address + lane * CHUNK_BYTES;
    if (lane < VALUE_CHUNKS) {
      tensor_load_3d(to, &q_map, lane * 64, first_head, work.token, ring.q_full());
    } else {
      tensor_load_3d(to, &turned_map, 0, first_head, work.token, ring.q_full());
    }
  }
}

template <typename WorkList>
__device__ __forceinline__ void latent_produce(const CUtensorMap& q_map, const CUtensorMap& turned_map,
                                               const CUtensorMap& cache_map, const LatentArguments& g,
                                               const LatentRing& ring, int lane) {
  // What one tile of heads, or a cluster of all, reads once; the rest should find it in L2.
  const bool once = g.lse == nullptr && g.head_tiles == ring.ctas;
  const uint64_t policy = once ? policy_evict_first() : policy_evict_normal();
  grid_dependency_wait();
  proxy_fence_async_global();
  const int first_head = blockIdx.x % g.head_tiles * g.group, q_rows = TILE_HEADS / g.group * g.group;
  WorkList list(g, blockIdx.x / g.head_tiles);
  uint32_t q_parity = 1, parity = 3;  // a bit per buffer
  for (bool more = true; more;) {
    Work work{};
    more = list.next(g, work, lane);
    PageWindow pages;
    pages.load(g, work.slot, work.start, work.end, 0, lane);
    mbarrier_wait(ring.q_empty(), q_parity);
    q_parity ^= 1;
    announce(q_map, turned_map, ring, work, first_head, q_rows, !more, lane);
    int buffer = 0;
    for (int from = work.start; from < work.end; from += TILE_KEYS, buffer ^= 1) {
      const int box = (from - work.start) / g.box_rows;
      if (box + TILE_KEYS / g.box_rows > pages.cached + 32) pages.load(g, work.slot, work.start, work.end, box, lane);
#pragma unroll
      for (int early = 1; early >= 0; --early) {
        mbarrier_wait(ring.empty(buffer, early), parity >> buffer & 1);
        load_half(cache_map, g, ring, pages, buffer, early, work.start, from, work.end, lane, policy);
      }
      parity ^= 1u << buffer;
    }
  }
  // A CTA ends when no other one has to release its buffers any more.
  for (int buffer = 0; buffer < BUFFERS; ++buffer) {
    for (int half = 0; half < HALVES; ++half) mbarrier_wait(ring.empty(buffer, half), parity >> buffer & 1);
  }
}

}  // namespace stoker
