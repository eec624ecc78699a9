// Decode attention over a paged cache, bound by the bytes of K and V: one query token per row, head dimension 128, up to
// 8 query heads per KV head, bf16 queries, a bf16 or e4m3 cache.
//
// A *stream* is one (row, KV head); a *unit* is 64 of its keys. All units in a line, row by row and head by head, are
// cut into equal shares, one per CTA (attention_shares.py plans them), so that every SM moves the same bytes. In a
// CTA, one producer warp streams units by TMA into a ring. Of each unit, each of four consumer warps weighs 16 keys, and
// hands their weights to the others; then each adds up 32 dimensions of all 64 values. So a stream's end has nothing to
// merge: it costs a division and a store. A stream in several shares leaves partial results, which the CTA that arrives
// last adds up in the order of the keys; a CTA arrives once, at its end.
//
// Keys are the M side of both products, heads the N side (8): Sᵀ = K·Qᵀ, Oᵀ = Vᵀ·Pᵀ. No row of an mma is wasted on
// padding a GQA group, and K and V go from shared memory to fragments without a transposition in registers.
//
// In a step whose plan and page table are settled (complete before this kernel can start), the producer fills the ring
// before the wait for the previous kernel: keys of earlier steps are in the cache. What the token of this step is part
// of, and the queries, follow after the wait.
#pragma once
#include <cuda.h>

#include "attention_ptx.cuh"

namespace stoker {

constexpr int UNIT = 64;       // keys
constexpr int HEAD_DIM = 128;
constexpr int HEADS = 8;       // the mma's N: query heads per KV head, at most
constexpr int CONSUMERS = 4;   // warps, 16 keys and 32 dimensions of a unit each
constexpr int CONSUMER_THREADS = CONSUMERS * 32;
constexpr int Q_PITCH = HEAD_DIM * 2 + 16;  // bytes; the 16 spread a fragment's rows over the banks
constexpr int HEADER_INTS = 8;
constexpr int MAX_AHEAD = 6;   // units loaded before the wait
constexpr int WHOLE = 8;       // units
constexpr float SLACK = 8.0f;   // how far logits may exceed a stream's running maximum, as powers of two
constexpr float LOG2E = 1.4426950408889634f;

struct bf16_cache {
  static constexpr int row_bytes = 256, halves = 2;  // a TMA box is 128 bytes wide
};
struct e4m3_cache {
  static constexpr int row_bytes = 128, halves = 1;
};

// The launcher mirrors this in attention_sm90.py.
struct DecodeArguments {
  __nv_bfloat16* out;
  const __nv_bfloat16* q;
  const int* page_table;
  const int* seq_lens;
  const int* seq_slots;
  const int* shares;  // [shares, 8]
  int* tickets;       // shares handed out, CTAs that are done; zero between launches
  float* partial;     // [2 · shares, group, 128]
  float* partial_lse; // [2 · shares, group]
  int* arrivals;      // [rows, KV heads], zero between launches
  const float* k_scale;
  const float* v_scale;
  const float* sinks;
  float scale_log2, softcap;
  int window, plan_window, rows, kv_heads, group, q_stride, out_stride, table_stride;
  int page_shift, page_rows, head_rows, box_rows, stages, num_shares, settled;
};

// Work for a CTA: `units` units from (row, head, block) on; blocks count units from the row's first key on. The line is
// cut into one share of `per_cta` units for each CTA and, where `tail` > 0, further ones of `tail`, handed out by ticket.
// With a tail, streams of up to WHOLE units are not cut: they belong to the share that their first unit lies in.
struct Share {
  int row, slot, head, block, units, len, per_cta, tail, index;

  __device__ __forceinline__ bool keeps(int stream_units) const { return tail > 0 && stream_units <= WHOLE; }
  __device__ __forceinline__ int start_of(int share) const {
    const int ctas = static_cast<int>(gridDim.x);
    return share <= ctas ? share * per_cta : ctas * per_cta + (share - ctas) * tail;
  }
  __device__ __forceinline__ int share_of(int unit) const {
    const int first_tail = static_cast<int>(gridDim.x) * per_cta;
    return tail == 0 || unit < first_tail ? unit / per_cta : static_cast<int>(gridDim.x) + (unit - first_tail) / tail;
  }
};

__device__ __forceinline__ Share load_share(const int* shares, int index) {
  const int4 a = load_int4(shares + index * 8), b = load_int4(shares + index * 8 + 4);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, index};
}

// One unit as the consumers see it.
struct Header {
  int row, head, valid, low;  // keys [low, valid) of the unit are visible
  int flags, share, first_share, last_share;  // this one, and those that have part of the stream
};
// A stream's first unit in a share, and its last; STARTS: the stream starts behind the start of its first share. END has
// no keys: the share is over; STOP: the CTA's work is.
constexpr int FIRST = 1, LAST = 2, STARTS = 4, END = 8, STOP = 16;

// What the consumers tell each other of a unit. `weights` are B fragments.
struct Exchange {
  uint2 weights[CONSUMERS][32];
  float maxima[HEADS][CONSUMERS];
};

template <typename Cache>
struct DecodeRing {
  static constexpr int tile_bytes = UNIT * Cache::row_bytes, stage_bytes = 2 * tile_bytes;
  unsigned char* data;
  unsigned char* q;
  Exchange* exchange;  // two: warps are up to a unit apart
  int* headers;
  int* last;           // of this CTA's two open streams, whether it is the last to arrive
  uint32_t data_address, q_address, full, empty;
  int q_bytes;

  // [stages of K and V][exchange][queries][headers][full barriers][empty barriers][last]; attention_sm90.py reserves it.
  __device__ DecodeRing(unsigned char* raw, int stages, int group) : q_bytes(group * Q_PITCH) {
    const uint32_t start = shared_address(raw);
    data_address = (start + 1023) & ~1023u;
    data = raw + (data_address - start);
    exchange = reinterpret_cast<Exchange*>(data + stages * stage_bytes);
    q = reinterpret_cast<unsigned char*>(exchange + 2);
    q_address = data_address + static_cast<uint32_t>(q - data);
    headers = reinterpret_cast<int*>(q + stages * q_bytes);
    full = q_address + stages * (q_bytes + HEADER_INTS * 4);
    empty = full + 8 * stages;
    last = headers + stages * (HEADER_INTS + 4);
  }
};

__device__ __forceinline__ int first_block(int len, int window) {
  return window > 0 ? max(len - window, 0) / UNIT : 0;
}

__device__ __forceinline__ int end_block(int len, int first) { return max((len + UNIT - 1) / UNIT, first + 1); }

// ---- producer ----------------------------------------------------------------------------------------------------

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
  int held[MAX_AHEAD];  // this lane's row of the cache for a unit that waits for the step's token, else −1

  __device__ __forceinline__ void load_rows(int to_stage, int from) const {
    const uint32_t to = ring.data_address + to_stage * stage_bytes + which * tile_bytes + half * (UNIT * 128) +
                        box * g.box_rows * 128;
    tensor_load_2d(to, which ? &v_map : &k_map, half * 64, from, ring.full + 8 * to_stage, once);
  }
  __device__ __forceinline__ void load_queries(int to_stage, int row, int head) const {
    if (lane >= g.group) return;
    const int64_t at = static_cast<int64_t>(row) * g.q_stride + (head * g.group + lane) * HEAD_DIM;
    bulk_load(ring.q_address + to_stage * ring.q_bytes + lane * Q_PITCH, g.q + at, HEAD_DIM * 2, ring.full + 8 * to_stage);
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
      if (held[i] >= 0) load_rows(i, held[i]);
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
  // Loads a unit: `from` is this lane's row of the cache, `last_keys` whether this step's token may be among the keys.
  __device__ __forceinline__ void load_unit(const Header& h, int from, bool last_keys) {
    if (ahead == min(g.stages, MAX_AHEAD)) settle();
    const int boxes = (h.valid + g.box_rows - 1) / g.box_rows;
    open(h, 2 * boxes * g.box_rows * Cache::row_bytes + (h.flags & FIRST ? g.group * HEAD_DIM * 2 : 0));
    const bool waits = ahead >= 0 && last_keys;
    if (box < boxes && !waits) load_rows(stage, from);
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
    const int begin = s.start_of(s.index), end = begin + s.units;
    int stream = begin - (block - now.first);  // its first unit in the line
    Header h{};
    h.share = s.index;
    while (true) {
      const int stream_units = now.end - now.first, unit = stream + block - now.first;
      const bool whole = s.keeps(stream_units);
      if (unit >= end && !(whole && block > now.first)) return;
      if (whole && stream < begin) {
        block = now.end - 1;  // the share before has it
      } else {
        if (unit == begin || block == now.first) {
          h.row = row, h.head = head;
          h.first_share = whole ? s.index : s.share_of(stream);
          h.last_share = whole ? s.index : s.share_of(stream + stream_units - 1);
          h.flags = FIRST | (s.start_of(h.first_share) != stream ? STARTS : 0);
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
        load_unit(h, from, (block + 1) * UNIT >= now.len);
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

// ---- consumers ---------------------------------------------------------------------------------------------------

// A warp's part of a stream: the running maxima, and sums of weighted values in mma's accumulators. Of this lane, heads
// 2·(lane % 4) and the next; sums[j] for j < 2 is [dimension a: two heads, dimension b: two heads] of 16 dimensions,
// sums[2] the weights alone. The maxima are those of all four warps.
struct Result {
  float m[2], sums[3][4];

  __device__ __forceinline__ void reset() {
    m[0] = m[1] = -INFINITY;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[j][c] = 0.0f;
    }
  }
};

// The fragments of a cache's keys and values, and the queries that go with them: zeros for heads that are not there, since
// any head may raise the maxima of a pair.
template <typename Cache>
struct Fragments;

// The address of the 16-byte chunk `chunk` (0…15 along a row of bf16, 0…7 of e4m3) of key `row` in a tile.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + (chunk >> 3) * (UNIT * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

template <>
struct Fragments<bf16_cache> {
  static constexpr uint32_t ones = 0x3F803F80;
  uint32_t q[16];

  __device__ __forceinline__ void load_queries(const unsigned char* queries, int group, int lane) {
    const unsigned char* own = queries + (lane / 4) * Q_PITCH + (lane % 4) * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = lane / 4 < group ? *reinterpret_cast<const uint32_t*>(own + i * 16) : 0;
  }
  __device__ __forceinline__ void multiply_keys(float (&s)[4], uint32_t tile, int warp, int lane) const {
    float odd[4] = {};
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, chunk_address(tile, row, 2 * i + lane / 16));
      mma_m16n8k16_bf16(i % 2 ? odd : s, a, q[2 * i], q[2 * i + 1]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] += odd[c];
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    mma_m16n8k16_bf16(d, a, b.x, b.y);
  }
  // The warp's dimensions of 16 values.
  static __device__ __forceinline__ void load_values(uint32_t (&a)[2][4], uint32_t tile, int block, int warp, int lane) {
    const int row = block * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) ldmatrix_x4_trans(a[j], chunk_address(tile, row, 4 * warp + 2 * j + lane / 8 % 2));
  }
  static __device__ __forceinline__ int dimension(int j, int half, int warp, int lane) {
    return warp * 32 + j * 16 + half * 8 + lane / 4;
  }
  // Stores the results of `group` heads, 128 dimensions each. Transposed, a lane has pairs of dimensions of a head.
  static __device__ __forceinline__ void store(__nv_bfloat16* out, const float (&o)[2][4], int group, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = transpose_8x8(pack_bf16(o[i / 2][i % 2 * 2], o[i / 2][i % 2 * 2 + 1]));
      const int at = lane / 4 * HEAD_DIM + warp * 32 + i * 8 + lane % 4 * 2;
      if (lane / 4 < group) *reinterpret_cast<uint32_t*>(out + at) = pair;
    }
  }
};

// ldmatrix moves pairs of e4m3: four neighbouring dimensions of a key, of which the first two go to the fragment's lower
// k half and the others to its upper one; of V, transposed, two dimensions of two keys, the fragment's rows r and r + 8.
template <>
struct Fragments<e4m3_cache> {
  static constexpr uint32_t ones = 0x3C003C00;
  uint32_t q[16];

  __device__ __forceinline__ void load_queries(const unsigned char* queries, int group, int lane) {
    const unsigned char* own = queries + (lane / 4) * Q_PITCH + (lane % 4) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 four = lane / 4 < group ? *reinterpret_cast<const uint2*>(own + i * 32) : make_uint2(0, 0);
      q[2 * i] = f16_from_bf16(four.x);
      q[2 * i + 1] = f16_from_bf16(four.y);
    }
  }
  __device__ __forceinline__ void multiply_keys(float (&s)[4], uint32_t tile, int warp, int lane) const {
    float odd[4] = {};
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t r[4], a[4];
      ldmatrix_x4(r, chunk_address(tile, row, 2 * i + lane / 16));
      unpack_e4m3(r[0], a[0], a[2]);
      unpack_e4m3(r[1], a[1], a[3]);
      mma_m16n8k16_f16(s, a, q[4 * i], q[4 * i + 1]);
      unpack_e4m3(r[2], a[0], a[2]);
      unpack_e4m3(r[3], a[1], a[3]);
      mma_m16n8k16_f16(odd, a, q[4 * i + 2], q[4 * i + 3]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] += odd[c];
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_f16(low, high); }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    mma_m16n8k16_f16(d, a, b.x, b.y);
  }
  static __device__ __forceinline__ void load_values(uint32_t (&a)[2][4], uint32_t tile, int block, int warp, int lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, chunk_address(tile, block * 16 + lane % 16, 2 * warp + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unpack_e4m3(__byte_perm(r[2 * j], 0, 0x3120), a[j][0], a[j][1]);
      unpack_e4m3(__byte_perm(r[2 * j + 1], 0, 0x3120), a[j][2], a[j][3]);
    }
  }
  static __device__ __forceinline__ int dimension(int j, int half, int warp, int lane) {
    return warp * 32 + j * 16 + lane / 4 * 2 + half;
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* out, const float (&o)[2][4], int group, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = lane % 4 * 2 + c, at = head * HEAD_DIM + dimension(j, 0, warp, lane);
        if (head < group) *reinterpret_cast<uint32_t*>(out + at) = pack_bf16(o[j][c], o[j][c + 2]);
      }
    }
  }
  static __device__ __forceinline__ uint32_t f16_from_bf16(uint32_t pair) {
    return pack_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  }
};

__device__ __forceinline__ float soft_cap(float logit_log2, float cap) {
  return (1.0f - 2.0f / (exp2_approx(logit_log2 * (2.0f / cap)) + 1.0f)) * (cap * LOG2E);
}

// Hands the weights of the warp's 16 keys to all warps. They are relative to the stream's running maxima, unless these
// keys exceed one by SLACK; the maxima they are relative to go with them.
template <typename Cache>
__device__ __forceinline__ void weigh_keys(const Result& a, const Fragments<Cache>& f, Exchange& to, const Header& h,
                                           uint32_t tile, float qk_scale, float softcap, int warp, int lane) {
  float m[2] = {a.m[0], a.m[1]};
  uint2 weights = {0, 0};
  if (h.valid > warp * 16 && h.low < warp * 16 + 16) {
    float s[4] = {};
    f.multiply_keys(s, tile, warp, lane);
    const bool whole = h.low == 0 && h.valid == UNIT;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[c] *= qk_scale;
      if (softcap > 0.0f) s[c] = soft_cap(s[c], softcap);
      const int key = warp * 16 + lane / 4 + c / 2 * 8;
      if (!whole && (key < h.low || key >= h.valid)) s[c] = -INFINITY;
    }
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    if (__any_sync(~0u, top[0] > m[0] + SLACK || top[1] > m[1] + SLACK)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], offset));
        m[c] = fmaxf(m[c], top[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] = exp2_approx(s[c] - m[c % 2]);
    weights.x = transpose_8x8(Fragments<Cache>::pack(s[0], s[1]));
    weights.y = transpose_8x8(Fragments<Cache>::pack(s[2], s[3]));
  }
  to.weights[warp][lane] = weights;
  if (lane < 4) to.maxima[2 * lane][warp] = m[0], to.maxima[2 * lane + 1][warp] = m[1];
}

__device__ __forceinline__ float weight(float m, float maximum) { return m == -INFINITY ? 0.0f : exp2_approx(m - maximum); }

// Adds the unit's weighted values, of the warp's dimensions.
template <typename Cache>
__device__ __forceinline__ void add_values(Result& a, const Exchange& from, const Header& h, uint32_t tile, int warp,
                                           int lane) {
  using F = Fragments<Cache>;
  constexpr uint32_t ones[4] = {F::ones, F::ones, F::ones, F::ones};
  float m[2][CONSUMERS], top[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float4 x = *reinterpret_cast<const float4*>(from.maxima[lane % 4 * 2 + c]);
    m[c][0] = x.x, m[c][1] = x.y, m[c][2] = x.z, m[c][3] = x.w;
    top[c] = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
  }
  const bool raised = __any_sync(~0u, top[0] > a.m[0] || top[1] > a.m[1]);
  if (!raised && h.valid == UNIT) {
#pragma unroll
    for (int block = 0; block < UNIT / 16; ++block) {
      uint32_t v[2][4];
      F::load_values(v, tile, block, warp, lane);
      const uint2 weights = from.weights[block][lane];
      F::multiply(a.sums[0], v[0], weights);
      F::multiply(a.sums[1], v[1], weights);
      F::multiply(a.sums[2], ones, weights);
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float kept = weight(a.m[c], top[c]);
    a.m[c] = top[c];
#pragma unroll
    for (int j = 0; j < 3; ++j) a.sums[j][c] *= kept, a.sums[j][c + 2] *= kept;
  }
#pragma unroll
  for (int block = 0; block < UNIT / 16; ++block) {
    if (block * 16 >= h.valid) break;
    uint32_t v[2][4], keep[2];  // rows that hold no key may be NaNs
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = block * 16 + i * 8 + lane % 4 * 2;
      keep[i] = (key < h.valid ? 0xFFFFu : 0u) | (key + 1 < h.valid ? 0xFFFF0000u : 0u);
    }
    F::load_values(v, tile, block, warp, lane);
    const uint2 weights = from.weights[block][lane];
    float part[3][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      v[j][0] &= keep[0], v[j][1] &= keep[0], v[j][2] &= keep[1], v[j][3] &= keep[1];
      F::multiply(part[j], v[j], weights);
    }
    F::multiply(part[2], ones, weights);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float scale = weight(m[c % 2][block], top[c % 2]);
#pragma unroll
      for (int j = 0; j < 3; ++j) a.sums[j][c] += scale * part[j][c];
    }
  }
}

// ---- a stream's end ----------------------------------------------------------------------------------------------

// Writes the stream's result. `a` need not be normalised.
template <typename Cache>
__device__ __forceinline__ void write_output(const DecodeArguments& g, const Header& h, const Result& a, int warp, int lane) {
  float o[2][4];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float sum = a.sums[2][c], scale = g.v_scale != nullptr ? g.v_scale[h.head] : 1.0f;
    const int head = min(lane % 4 * 2 + c, g.group - 1);
    if (g.sinks != nullptr) {
      const float sink = g.sinks[h.head * g.group + head] * LOG2E, top = fmaxf(a.m[c], sink);
      const float kept = weight(a.m[c], top);
      sum = sum * kept + exp2_approx(sink - top);
      scale *= kept;
    }
    scale = sum > 0.0f ? scale / sum : 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) o[j][c] = a.sums[j][c] * scale, o[j][c + 2] = a.sums[j][c + 2] * scale;
  }
  __nv_bfloat16* out = g.out + static_cast<int64_t>(h.row) * g.out_stride + h.head * g.group * HEAD_DIM;
  Fragments<Cache>::store(out, o, g.group, warp, lane);
}

// Which of a share's two slots of partial results its part of the stream lies in.
__device__ __forceinline__ int partial_slot(int share, const Header& h) {
  return 2 * share + (share == h.first_share && h.flags & STARTS ? 1 : 0);
}

// Calls visit(c, offset in a slot's results, j, half) for the lane's elements in heads that are there.
template <typename Cache, typename Visit>
__device__ __forceinline__ void each_element(int group, int warp, int lane, Visit visit) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int head = lane % 4 * 2 + c;
    if (head >= group) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(c, head * HEAD_DIM + Fragments<Cache>::dimension(j, half, warp, lane), j, half);
      }
    }
  }
}

// Leaves this share's normalised result in memory.
template <typename Cache>
__device__ __forceinline__ void leave_partial(const DecodeArguments& g, const Header& h, const Result& a, int warp, int lane) {
  const int slot = partial_slot(h.share, h);
  float* own = g.partial + static_cast<int64_t>(slot) * g.group * HEAD_DIM;
  each_element<Cache>(g.group, warp, lane, [&](int c, int at, int j, int half) {
    const float sum = a.sums[2][c];
    own[at] = sum > 0.0f ? a.sums[j][c + 2 * half] / sum : 0.0f;
  });
  if (warp != 0 || lane >= 4) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float sum = a.sums[2][c];
    if (lane * 2 + c < g.group) g.partial_lse[slot * g.group + lane * 2 + c] = sum > 0.0f ? a.m[c] + log2f(sum) : -INFINITY;
  }
}

// The sum of all shares of a stream, in their order, as a result.
template <typename Cache>
__device__ __forceinline__ void add_shares(const DecodeArguments& g, const Header& h, Result& a, int warp, int lane) {
  a.reset();
  const int heads[2] = {min(lane % 4 * 2, g.group - 1), min(lane % 4 * 2 + 1, g.group - 1)};
#pragma unroll 4
  for (int share = h.first_share; share <= h.last_share; ++share) {
    const float* lse = g.partial_lse + partial_slot(share, h) * g.group;
#pragma unroll
    for (int c = 0; c < 2; ++c) a.m[c] = fmaxf(a.m[c], load_float(lse + heads[c]));
  }
#pragma unroll 4
  for (int share = h.first_share; share <= h.last_share; ++share) {
    const int64_t slot = static_cast<int64_t>(partial_slot(share, h)) * g.group;
    float w[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      w[c] = weight(load_float(g.partial_lse + slot + heads[c]), a.m[c]);
      a.sums[2][c] += w[c];
    }
    each_element<Cache>(g.group, warp, lane, [&](int c, int at, int j, int half) {
      a.sums[j][c + 2 * half] += w[c] * load_float(g.partial + slot * HEAD_DIM + at);
    });
  }
}

// Arrives at the streams that this share has part of, its first and its last (none: first_share is last_share), and
// writes those that it is the last to arrive at.
template <typename Cache>
__device__ __forceinline__ void combine_shares(const DecodeArguments& g, const Header (&open)[2], Result& a, int* last,
                                               int warp, int lane) {
  named_barrier(1, CONSUMER_THREADS);  // puts all partial results before the one thread's release
  if (threadIdx.x < 2) {
    const bool first = threadIdx.x == 0;
    const int row = first ? open[0].row : open[1].row, head = first ? open[0].head : open[1].head;
    const int others = first ? open[0].last_share - open[0].first_share : open[1].last_share - open[1].first_share;
    int* arrivals = g.arrivals + row * g.kv_heads + head;
    const bool is_last = others > 0 && atomic_add_acq_rel(arrivals, 1) == others;
    if (is_last) *arrivals = 0;
    last[threadIdx.x] = is_last;
  }
  named_barrier(1, CONSUMER_THREADS);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!last[i]) continue;
    add_shares<Cache>(g, open[i], a, warp, lane);
    write_output<Cache>(g, open[i], a, warp, lane);
  }
}

template <typename Cache>
__device__ __forceinline__ void consume(const DecodeArguments& g, const DecodeRing<Cache>& ring, int warp, int lane) {
  Result a;
  Fragments<Cache> f;
  Header open[2] = {};
  int stage = 0, turn = 0;
  uint32_t parity = 0;
  float qk_scale = g.scale_log2;
  grid_dependency_wait();
  while (true) {
    mbarrier_wait(ring.full + 8 * stage, parity);
    const int4* fields = reinterpret_cast<const int4*>(ring.headers + stage * HEADER_INTS);
    const int4 x = fields[0], y = fields[1];
    const Header h{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    if (h.flags & FIRST) {
      a.reset();
      f.load_queries(ring.q + stage * ring.q_bytes, g.group, lane);
      if (g.k_scale != nullptr) qk_scale = g.scale_log2 * g.k_scale[h.head];
    }
    if (h.valid > h.low) {
      Exchange& exchange = ring.exchange[turn];
      const uint32_t tile = ring.data_address + stage * DecodeRing<Cache>::stage_bytes;
      weigh_keys(a, f, exchange, h, tile, qk_scale, g.softcap, warp, lane);
      named_barrier(1, CONSUMER_THREADS);
      add_values<Cache>(a, exchange, h, tile + DecodeRing<Cache>::tile_bytes, warp, lane);
      turn ^= 1;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
    if (h.flags & LAST) {
      if (h.first_share == h.last_share) {
        write_output<Cache>(g, h, a, warp, lane);
      } else {
        leave_partial<Cache>(g, h, a, warp, lane);
        if (h.share == h.first_share) {
          open[1] = h;
        } else {
          open[0] = h;
        }
      }
    }
    if (h.flags & END) {
      if (open[0].last_share > open[0].first_share || open[1].last_share > open[1].first_share) {
        combine_shares<Cache>(g, open, a, ring.last, warp, lane);
        open[0] = open[1] = {};
      }
      if (h.flags & STOP) return;
    }
    if (++stage == g.stages) stage = 0, parity ^= 1;
  }
}

template <typename Cache>
__device__ __forceinline__ void sm90_decode(const CUtensorMap& k_map, const CUtensorMap& v_map,
                                            const DecodeArguments& g) {
  extern __shared__ unsigned char raw[];
  const DecodeRing<Cache> ring(raw, g.stages, g.group);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == CONSUMERS && lane == 0) {
    tensor_map_prefetch(&k_map);
    tensor_map_prefetch(&v_map);
    for (int s = 0; s < g.stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
  if (warp == CONSUMERS) {
    Producer<Cache>{k_map, v_map, g, ring, lane}.run();
  } else {
    consume<Cache>(g, ring, warp, lane);
  }
}

}  // namespace stoker

#define STOKER_SM90_DECODE(NAME, CACHE)                                                                           \
  extern "C" __global__ void __launch_bounds__(stoker::CONSUMER_THREADS + 32, 3)                                  \
      NAME(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,                  \
           const __grid_constant__ stoker::DecodeArguments g) {                                                   \
    stoker::sm90_decode<CACHE>(k_map, v_map, g);                                                                  \
  }
