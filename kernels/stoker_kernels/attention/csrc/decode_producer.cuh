// sm90_decode's producer warp: walks the units of its shares and streams them into the ring.
#pragma once
#include "decode_ring.cuh"

namespace stoker {

// A row of the walk, with 32 of its page numbers, one per lane, from `first_page` on.
struct WalkRow {
  int len, slot, first, end, first_page, page;

  __device__ __forceinline__ void load(const DecodeArguments& g, int row) {
    const bool real = row < g.rows;
    len = real ? load_int(g.seq_lens + row) : 0;
    slot = real ? load_int(g.seq_slots + row) : 0;
  }
  __device__ __forceinline__ void place(const DecodeArguments& g) {
    first = first_block(len, g.plan_window);
    end = end_block(len, first);
  }
  __device__ __forceinline__ void load_pages(const DecodeArguments& g, int block, int lane) {
    first_page = block * UNIT >> g.page_shift;
    const int at = first_page + lane;
    page = (at << g.page_shift) < len ? load_int(g.page_table + static_cast<int64_t>(slot) * g.table_stride + at) : 0;
  }
};

template <typename Cache>
struct Producer {
  static constexpr int tile_bytes = DecodeRing<Cache>::tile_bytes, stage_bytes = DecodeRing<Cache>::stage_bytes;
  const CUtensorMap& k_map;
  const CUtensorMap& v_map;
  const DecodeArguments& g;
  const DecodeRing<Cache>& ring;
  const int lane;
  const uint64_t once = policy_evict_first();
  // Lane: (box, half of a row's bytes, K or V).
  const int box = lane / (2 * Cache::halves), half = lane / 2 % Cache::halves, which = lane % 2;
  int stage = 0, ahead = 0;  // units loaded before the wait; −1 after it
  uint32_t parity = 1;
  int held[MAX_AHEAD];  // this lane's row of the cache for a unit that waits for the step's tokens, else −1

  __device__ __forceinline__ void load_rows(int to_stage, int from, uint64_t policy) const {
    const uint32_t to = ring.data_address + to_stage * stage_bytes + which * tile_bytes + half * (UNIT * 128) +
                        box * g.box_rows * 128;
    tensor_load_2d(to, which ? &v_map : &k_map, half * 64, from, ring.full + 8 * to_stage, policy);
  }
  __device__ __forceinline__ void load_queries(int to_stage, int row, int head) const {
    if (lane >= g.group) return;
    const int64_t at = static_cast<int64_t>(row) * g.q_stride + (head * g.group + lane) * HEAD_DIM;
    const uint32_t to = ring.q_address + to_stage * ring.q_bytes + lane * Q_PITCH;
    bulk_load(to, g.q + at, HEAD_DIM * 2, ring.full + 8 * to_stage);
  }
  // Waits for the kernel before, and loads what that had to finish.
  __device__ __forceinline__ void settle() {
    if (ahead < 0) return;
    grid_dependency_wait();
    proxy_fence_async();
#pragma unroll
    for (int i = 0; i < MAX_AHEAD; ++i) {
      if (i >= ahead) continue;
      const int4* header = reinterpret_cast<const int4*>(ring.headers + i * HEADER_INTS);
      const int4 x = header[0];
      if (header[1].x & FIRST) load_queries(i, x.x, x.y);
      if (held[i] >= 0) load_rows(i, held[i], once);
    }
    ahead = -1;
  }
  // Opens the next stage, for `bytes` of copies.
  __device__ __forceinline__ void open(const Header& h, int bytes) const {
    mbarrier_wait(ring.empty + 8 * stage, parity);
    if (lane == 0) {
      int4* header = reinterpret_cast<int4*>(ring.headers + stage * HEADER_INTS);
      header[0] = make_int4(h.row, h.head, h.valid, h.low);
      header[1] = make_int4(h.flags, h.share, h.first_share, h.last_share);
      mbarrier_arrive_expect(ring.full + 8 * stage, bytes);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void close() {
    if (++stage == g.stages) stage = 0, parity ^= 1;
  }
  // Loads a unit: `from` is this lane's row of the cache, `last_keys` whether tokens of this step may be among the keys.
  __device__ __forceinline__ void load_unit(const Header& h, int from, bool last_keys) {
    if (ahead == min(g.stages, MAX_AHEAD)) settle();
    const int boxes = (h.valid + g.box_rows - 1) / g.box_rows;
    open(h, 2 * boxes * g.box_rows * Cache::row_bytes + (h.flags & FIRST ? g.group * HEAD_DIM * 2 : 0));
    const bool waits = ahead >= 0 && last_keys;
    if (box < boxes && !waits) load_rows(stage, from, once);
    if (ahead >= 0) {
#pragma unroll
      for (int j = 0; j < MAX_AHEAD; ++j) {
        if (j == ahead) held[j] = box < boxes && waits ? from : -1;
      }
      ++ahead;
    } else if (h.flags & FIRST) {
      load_queries(stage, h.row, h.head);
    }
    close();
  }

  __device__ __forceinline__ void walk(const Share& s) {
    WalkRow now{s.len, s.slot}, next{};
    now.place(g);
    now.load_pages(g, s.block, lane);
    next.load(g, s.row + 1);
    bool next_paged = false;
    int row = s.row, head = s.head, block = s.block;
    const bool whole = s.per_cta == 0;
    const int begin = s.index * s.per_cta, end = begin + s.units;  // in the line; where streams are whole, in the share
    int stream = begin - (block - now.first);  // its first unit
    Header h{};
    h.share = s.index;
    while (true) {
      const int stream_units = now.end - now.first, unit = stream + block - now.first;
      if (unit >= end && !(whole && block > now.first)) return;
      if (whole && stream < begin) {
        block = now.end - 1;  // the share before has it
      } else {
        if (unit == begin || block == now.first) {
          h.row = row, h.head = head;
          h.first_share = whole ? s.index : stream / s.per_cta;
          h.last_share = whole ? s.index : (stream + stream_units - 1) / s.per_cta;
          h.flags = FIRST | (!whole && stream % s.per_cta != 0 ? STARTS : 0);
        } else {
          h.flags &= ~FIRST;
        }
        if (block + 1 == now.end || (unit + 1 == end && !whole)) h.flags |= LAST;
        h.valid = min(max(now.len - block * UNIT, 0), UNIT);
        h.low = g.window > 0 ? max(now.len - g.window - block * UNIT, 0) : 0;
        const int first_page = block * UNIT >> g.page_shift;
        if (first_page + UNIT / g.box_rows > now.first_page + 32) now.load_pages(g, block, lane);
        const int key = block * UNIT + box * g.box_rows;
        const int page = __shfl_sync(~0u, now.page, (key >> g.page_shift) - now.first_page);
        const int from = page * g.page_rows + head * g.head_rows + (key & ((1 << g.page_shift) - 1));
        load_unit(h, from, (block + 1) * UNIT > now.len - g.fresh);
      }
      if (block + 1 < now.end) {
        ++block;
      } else {
        stream += stream_units;
        if (++head == g.kv_heads) {
          next.place(g);
          if (!next_paged) next.load_pages(g, next.first, lane);
          now = next;
          block = now.first;
          head = 0;
          next.load(g, ++row + 1);
          next_paged = false;
          continue;
        }
        block = now.first;
        if (now.first_page != now.first * UNIT >> g.page_shift) now.load_pages(g, block, lane);
      }
      if (!next_paged) {  // the next row's lengths were asked for a unit ago
        next.place(g);
        next.load_pages(g, next.first, lane);
        next_paged = true;
      }
    }
  }

  // The next share of the tail, without units where there is none.
  __device__ __forceinline__ Share draw(const Share& last) const {
    if (last.tail == 0) return {};
    const int ticket = __shfl_sync(~0u, lane == 0 ? atomic_add_acq_rel(g.tickets, 1) : 0, 0);
    const int index = static_cast<int>(gridDim.x) + ticket;
    const Share s = index < g.num_shares ? load_share(g.shares, index) : Share{};
    // Every CTA has drawn its last ticket when the last one comes by here.
    if (s.units == 0 && lane == 0 && atomic_add_acq_rel(g.tickets + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      g.tickets[0] = 0;
      g.tickets[1] = 0;
    }
    return s;
  }

  __device__ __forceinline__ void run() {
    if (!g.settled) {
      grid_dependency_wait();
      ahead = -1;
    }
    proxy_fence_async();
    Share s = load_share(g.shares, blockIdx.x);
    if (s.units == 0) s.tail = 0;
    do {
      if (s.units > 0) walk(s);
      settle();
      s = draw(s);
      Header h{};
      h.flags = END | (s.units == 0 ? STOP : 0);
      open(h, 0);
      close();
    } while (s.units > 0);
  }
};

}  // namespace stoker
