// Attention of a mixed step in one launch: the shares of its decode rows, as sm90_decode does them, and tiles of its
// prefill chunks, in the same ring, one after another as a CTA draws them. Decoding waits for memory and prefill for the
// tensor cores, so an SM may have a CTA of each kind: `decode_ctas` CTAs begin with shares, the others with tiles, and
// each goes over to the other kind when there is none of its own left (as POD-Attention does, Kamath et al. 2024).
//
// tile_plan_kernel lists the tiles, those with most keys first (tile_plan.py). Which CTA draws what changes no
// result: a tile is one CTA's, and a stream's partial results are added up in the order of its shares.
#pragma once
#include "attention_tile.cuh"
#include "decode_consumers.cuh"
#include "decode_producer.cuh"

namespace stoker {

// The launcher mirrors this in sm90_mixed.py. Of `decode`, `tickets` are shares drawn, CTAs that are done,
// tiles drawn; `num_shares` is 0 in a step without decode rows.
struct MixedArguments {
  DecodeArguments decode;
  const int* tiles;      // [num_tiles, 8]
  const int* num_tiles;
  int decode_ctas;       // that begin with the share of their number
};

// A tile of the plan, for one KV head. `keys` are those of its row; 0: padding.
struct TileWork {
  int token, count, position, keys, slot, head;
};

template <typename Cache>
struct MixedProducer : Producer<Cache> {
  using Base = Producer<Cache>;
  using Base::g, Base::ring, Base::lane, Base::stage;
  const MixedArguments& m;
  const uint64_t keep = policy_evict_last();
  const int first_tickets = static_cast<int>(gridDim.x) - m.decode_ctas;  // of the CTAs that begin with a tile
  int tickets = 0, ticket = 0;  // all (tile, KV head), the one at hand
  TileWork tile{};
  WalkRow row{};

  __device__ __forceinline__ MixedProducer(const CUtensorMap& k_map, const CUtensorMap& v_map, const MixedArguments& m,
                                           const DecodeRing<Cache>& ring, int lane)
      : Base{k_map, v_map, m.decode, ring, lane}, m(m) {}

  // Takes a ticket of a counter; what lane 0 got is not waited for.
  __device__ __forceinline__ int draw_from(int* counter) const {
    return lane == 0 ? atomic_add_acq_rel(counter, 1) : 0;
  }
  __device__ __forceinline__ static int of_lane_0(int drawn) { return __shfl_sync(~0u, drawn, 0); }

  __device__ __forceinline__ Share next_share() const {
    const int index = g.num_shares > 0 ? m.decode_ctas + of_lane_0(draw_from(g.tickets)) : 0;
    return index < g.num_shares ? load_share(g.shares, index) : Share{};
  }

  // Reads the tile of `ticket`, if there is one, and its first pages.
  __device__ __forceinline__ void read_tile() {
    if (ticket >= (tickets > 0 ? tickets : MAX_TILES * g.kv_heads)) return;
    const int* fields = m.tiles + ticket / g.kv_heads * TILE_INTS;
    const int4 x = load_int4(fields);
    const int slot = load_int(fields + 4);
    if (tickets == 0) tickets = load_int(m.num_tiles) * g.kv_heads;
    if (ticket >= tickets) return;
    tile = {x.x, x.y, x.z, x.w, slot, ticket % g.kv_heads};
    row.len = tile.keys, row.slot = slot;
    row.first = g.window > 0 ? max(tile.position - g.window + 1, 0) / UNIT : 0;
    row.end = tile.keys > 0 ? (tile.position + tile.count + UNIT - 1) / UNIT : row.first;
    if (row.first < row.end) row.load_pages(g, row.first, lane);
  }

  // Streams the units of the tile at hand; returns the next ticket as drawn.
  __device__ __forceinline__ int walk_tile() {
    const Header h{tile.token, tile.head, tile.count, tile.position, TILE, tile.keys, row.first, row.end};
    this->open(h, 0);  // ahead of the keys: the consumers load the queries meanwhile
    this->close();
    int drawn = 0;
    for (int unit = row.first; unit < row.end; ++unit) {
      if ((unit * UNIT >> g.page_shift) + UNIT / g.box_rows > row.first_page + 32) row.load_pages(g, unit, lane);
      const int boxes = (min(row.len - unit * UNIT, UNIT) + g.box_rows - 1) / g.box_rows;
      const int key = unit * UNIT + this->box * g.box_rows;
      const int page = __shfl_sync(~0u, row.page, (key >> g.page_shift) - row.first_page);
      const int from = page * g.page_rows + tile.head * g.head_rows + (key & ((1 << g.page_shift) - 1));
      if (unit + 1 == row.end) drawn = draw_from(g.tickets + 2);
      this->open(h, 2 * boxes * g.box_rows * Cache::row_bytes);
      if (this->box < boxes) this->load_rows(stage, from, keep);
      this->close();
    }
    return row.first < row.end ? drawn : draw_from(g.tickets + 2);
  }

  __device__ __forceinline__ void end(int flags) {
    Header h{};
    h.flags = END | flags;
    this->open(h, 0);
    this->close();
  }

  __device__ __forceinline__ void run() {
    const bool decodes = static_cast<int>(blockIdx.x) < m.decode_ctas;
    if (!g.settled) {
      grid_dependency_wait();
      this->ahead = -1;
    }
    proxy_fence_async();
    // Shares from a CTA's own on, then tiles; or tiles from its own on, then shares.
    Share s = decodes ? load_share(g.shares, blockIdx.x) : Share{};
    if (!decodes) {
      ticket = static_cast<int>(blockIdx.x) - m.decode_ctas;
      read_tile();
      this->settle();
    }
    bool tiles_left = true, shares_left = true, on_shares = decodes;
    while (true) {
      if (on_shares) {
        if (s.units > 0) this->walk(s);
        this->settle();
        if (s.units > 0) end(0);
        s = next_share();
        if (s.units > 0) continue;
        shares_left = on_shares = false;
        if (!tiles_left) break;
        ticket = first_tickets + of_lane_0(draw_from(g.tickets + 2));
      } else {
        if (ticket < tickets) {
          ticket = first_tickets + of_lane_0(walk_tile());
        } else {
          tiles_left = false;
          on_shares = shares_left;
          if (!shares_left) break;
          continue;
        }
      }
      read_tile();
    }
    end(STOP);
    // Every CTA has drawn its last tickets when the last one comes by here.
    if (lane == 0 && atomic_add_acq_rel(g.tickets + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      g.tickets[0] = 0;
      g.tickets[1] = 0;
      g.tickets[2] = 0;
    }
  }
};

template <typename Cache>
__device__ __forceinline__ void sm90_mixed(const CUtensorMap& k_map, const CUtensorMap& v_map, const MixedArguments& m) {
  extern __shared__ unsigned char raw[];
  const DecodeRing<Cache> ring(raw + TileElement<Cache>::staging_bytes, m.decode.stages, m.decode.group);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  start_ring(ring, k_map, v_map, m.decode.stages);
  launch_dependents();
  if (warp == CONSUMERS) {
    MixedProducer<Cache>(k_map, v_map, m, ring, lane).run();
  } else {
    consume(m.decode, ring, TileConsumer<Cache>{m.decode, ring, warp, lane}, warp, lane);
  }
}

}  // namespace stoker

#define STOKER_SM90_MIXED(NAME, CACHE)                                                                            \
  extern "C" __global__ void __launch_bounds__(stoker::CONSUMER_THREADS + 32, 2)                                  \
      NAME(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,                  \
           const __grid_constant__ stoker::MixedArguments m) {                                                    \
    stoker::sm90_mixed<CACHE>(k_map, v_map, m);                                                                   \
  }
