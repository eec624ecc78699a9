// Decode attention over a paged cache, bound by the bytes of K and V: one query token per row, head dimension 128, up to
// 8 query heads per KV head, bf16 queries, a bf16 or e4m3 cache.
//
// A *stream* is one (row, KV head); a *unit* is 64 of its keys. All units in a line, row by row and head by head, are
// cut into equal shares, one per CTA (attention_shares.py plans them), so that every SM moves the same bytes. In a
// CTA, one producer warp streams units by TMA into a ring; four consumer warps take 16 keys of each unit, with online
// softmaxes of their own that meet at the stream's end. A stream in several shares leaves partial results, which the
// CTA that arrives last adds up in the order of the keys.
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
constexpr int CONSUMERS = 4;   // warps, 16 keys of a unit each
constexpr int CONSUMER_THREADS = CONSUMERS * 32;
constexpr int Q_PITCH = HEAD_DIM * 2 + 16;  // bytes; the 16 spread a fragment's rows over the banks
constexpr int Q_BYTES = HEADS * Q_PITCH;
constexpr int HEADER_INTS = 8;
constexpr int MAX_AHEAD = 6;   // units loaded before the wait
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
  const int* shares;  // [CTAs, 8]
  float* partial;     // [2 · CTAs, group, 128]
  float* partial_lse; // [2 · CTAs, group]
  int* arrivals;      // [rows, KV heads], zero between launches
  const float* k_scale;
  const float* v_scale;
  const float* sinks;
  float scale_log2, softcap;
  int window, plan_window, rows, kv_heads, group, q_stride, out_stride, table_stride;
  int page_shift, page_rows, head_rows, box_rows, stages, settled;
};

// What a CTA works on: `units` units from (row, head, block) on; blocks count units from the row's first key on.
struct Share {
  int row, slot, head, block, units, len, per_cta;
};

__device__ __forceinline__ Share load_share(const int* shares) {
  const int4 a = load_int4(shares + blockIdx.x * 8), b = load_int4(shares + blockIdx.x * 8 + 4);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
}

// One unit as the consumers see it.
struct Header {
  int row, head, valid, low;  // keys [low, valid) of the unit are visible
  int flags, first_cta, last_cta, start_aligned;
};
constexpr int FIRST = 1, LAST = 2, STOP = 4;

template <typename Cache>
struct DecodeRing {
  static constexpr int tile_bytes = UNIT * Cache::row_bytes, stage_bytes = 2 * tile_bytes;
  unsigned char* data;
  unsigned char* q;
  int* headers;
  float2* stats;  // [warp][head]: maximum, sum
  int* flag;
  uint32_t data_address, q_address, full, empty;

  // [stages of K and V][queries][headers][stats][full barriers][empty barriers][flag]; attention_sm90.py reserves it.
  __device__ DecodeRing(unsigned char* raw, int stages) {
    const uint32_t start = shared_address(raw);
    data_address = (start + 1023) & ~1023u;
    data = raw + (data_address - start);
    q = data + stages * stage_bytes;
    q_address = data_address + stages * stage_bytes;
    headers = reinterpret_cast<int*>(q + stages * Q_BYTES);
    stats = reinterpret_cast<float2*>(headers + stages * HEADER_INTS);
    full = q_address + stages * (Q_BYTES + HEADER_INTS * 4) + CONSUMERS * HEADS * 8;
    empty = full + 8 * stages;
    flag = reinterpret_cast<int*>(stats + CONSUMERS * HEADS) + 4 * stages;
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
__device__ __forceinline__ void produce(const CUtensorMap& k_map, const CUtensorMap& v_map, const DecodeArguments& g,
                                        const DecodeRing<Cache>& ring, int lane) {
  constexpr int tile_bytes = DecodeRing<Cache>::tile_bytes;
  const uint64_t once = policy_evict_first();
  if (!g.settled) grid_dependency_wait();
  proxy_fence_async();
  const Share s = load_share(g.shares);
  const int units = max(s.units, 1), ahead = g.settled ? min(units, min(g.stages, MAX_AHEAD)) : 0;
  int held[MAX_AHEAD];  // this lane's row of the cache for a unit that waits for the step's token, else −1
  // Lane: (box, half of a row's bytes, K or V).
  const int box = lane / (2 * Cache::halves), half = lane / 2 % Cache::halves, which = lane % 2;
  auto load_rows = [&](int stage, int from) {
    const uint32_t to = ring.data_address + stage * DecodeRing<Cache>::stage_bytes + which * tile_bytes +
                        half * (UNIT * 128) + box * g.box_rows * 128;
    tensor_load_2d(to, which ? &v_map : &k_map, half * 64, from, ring.full + 8 * stage, once);
  };
  auto load_queries = [&](int stage, int row, int head) {
    if (lane >= g.group) return;
    const int64_t at = static_cast<int64_t>(row) * g.q_stride + (head * g.group + lane) * HEAD_DIM;
    bulk_load(ring.q_address + stage * Q_BYTES + lane * Q_PITCH, g.q + at, HEAD_DIM * 2, ring.full + 8 * stage);
  };
  auto complete_ahead = [&] {
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
  };
  WalkRow now{s.len, s.slot}, next{};
  now.place(g);
  now.load_pages(g, s.block, lane);
  next.load(g, s.row + 1);
  bool next_paged = false;
  int row = s.row, head = s.head, block = s.block;
  int start = static_cast<int>(blockIdx.x) * s.per_cta - (block - now.first);  // the stream's first unit
  int stage = 0;
  uint32_t parity = 1;
  for (int i = 0; i < units; ++i) {
    if (i == ahead && g.settled) complete_ahead();
    const int valid = s.units > 0 ? min(max(now.len - block * UNIT, 0), UNIT) : 0;
    const bool first = i == 0 || block == now.first, last = block + 1 == now.end;
    const int boxes = (valid + g.box_rows - 1) / g.box_rows;
    const int first_page = block * UNIT >> g.page_shift;
    if (first_page + UNIT / g.box_rows > now.first_page + 32) now.load_pages(g, block, lane);
    mbarrier_wait(ring.empty + 8 * stage, parity);
    if (lane == 0) {
      const int flags = s.units == 0 ? STOP : (first ? FIRST : 0) | (last || i + 1 == s.units ? LAST : 0) |
                                                 (i + 1 == s.units ? STOP : 0);
      const int low = g.window > 0 ? max(now.len - g.window - block * UNIT, 0) : 0;
      int4* header = reinterpret_cast<int4*>(ring.headers + stage * HEADER_INTS);
      header[0] = make_int4(row, head, valid, low);
      header[1] = s.units == 0 ? make_int4(flags, 0, 0, 1)
                               : make_int4(flags, start / s.per_cta, (start + now.end - now.first - 1) / s.per_cta,
                                           start % s.per_cta == 0);
      const int q_bytes = first && s.units > 0 ? g.group * HEAD_DIM * 2 : 0;
      mbarrier_arrive_expect(ring.full + 8 * stage, 2 * boxes * g.box_rows * Cache::row_bytes + q_bytes);
    }
    __syncwarp();
    if (i >= ahead && first && s.units > 0) load_queries(stage, row, head);
    const int key = block * UNIT + box * g.box_rows;
    const int page = __shfl_sync(~0u, now.page, (key >> g.page_shift) - now.first_page);
    const int from = page * g.page_rows + head * g.head_rows + (key & ((1 << g.page_shift) - 1));
    const bool waits = i < ahead && (block + 1) * UNIT >= now.len;
    if (box < boxes && !waits) load_rows(stage, from);
#pragma unroll
    for (int j = 0; j < MAX_AHEAD; ++j) {
      if (j == i) held[j] = box < boxes && waits ? from : -1;
    }
    if (++stage == g.stages) stage = 0, parity ^= 1;
    if (!last) {
      ++block;
    } else if (++head < g.kv_heads) {
      start += now.end - now.first;
      block = now.first;
    } else {
      start += now.end - now.first;
      next.place(g);
      if (!next_paged) next.load_pages(g, next.first, lane);
      now = next;
      block = now.first;
      head = 0;
      next.load(g, ++row + 1);
      next_paged = false;
      continue;
    }
    if (!next_paged) {  // the next row's lengths were asked for a unit ago
      next.place(g);
      next.load_pages(g, next.first, lane);
      next_paged = true;
    }
    if (block == now.first && now.first_page != now.first * UNIT >> g.page_shift) now.load_pages(g, block, lane);
  }
  if (units == ahead) complete_ahead();
}

// ---- consumers ---------------------------------------------------------------------------------------------------

// A warp's online softmax and result for 8 heads: of this lane, heads 2·(lane % 4) and the next. For tile j of 16
// dimensions, o[j] is [dimension a: two heads, dimension b: two heads].
struct Partial {
  float m[2], l[2];
  float o[8][4];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int c = 0; c < 2; ++c) m[c] = -INFINITY, l[c] = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) o[j][c] = 0.0f;
    }
  }
};

// Dimensions of o[j]'s pairs a and b, and the B fragments of the queries that go with the cache's A fragments.
template <typename Cache>
struct Fragments;

// The address of the 16-byte chunk `chunk` (0…15 along a row of bf16, 0…7 of e4m3) of key `row` in a tile.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + (chunk >> 3) * (UNIT * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

template <>
struct Fragments<bf16_cache> {
  uint32_t q[16];

  static __device__ __forceinline__ int dimension_a(int j, int lane) { return j * 16 + lane / 4; }
  static __device__ __forceinline__ int dimension_b(int j, int lane) { return j * 16 + lane / 4 + 8; }

  __device__ __forceinline__ void load_queries(const unsigned char* queries, int lane) {
    const unsigned char* own = queries + (lane / 4) * Q_PITCH + (lane % 4) * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) q[i] = *reinterpret_cast<const uint32_t*>(own + i * 16);
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
  // `keep`: masks of the fragments' key pairs, against NaNs in rows that hold no key.
  __device__ __forceinline__ void multiply_values(float (&o)[8][4], const float (&p)[4], uint32_t tile, int warp,
                                                  int lane, const uint32_t (&keep)[2]) const {
    const uint32_t b0 = transpose_8x8(pack_bf16(p[0], p[1])), b1 = transpose_8x8(pack_bf16(p[2], p[3]));
    const int row = warp * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, chunk_address(tile, row, 2 * j + lane / 8 % 2));
      a[0] &= keep[0], a[1] &= keep[0], a[2] &= keep[1], a[3] &= keep[1];
      mma_m16n8k16_bf16(o[j], a, b0, b1);
    }
  }
};

// ldmatrix moves pairs of e4m3: four neighbouring dimensions of a key, of which the first two go to the fragment's lower
// k half and the others to its upper one; of V, transposed, two dimensions of two keys, the fragment's rows r and r + 8.
template <>
struct Fragments<e4m3_cache> {
  uint32_t q[16];

  static __device__ __forceinline__ int dimension_a(int j, int lane) { return j * 16 + lane / 4 * 2; }
  static __device__ __forceinline__ int dimension_b(int j, int lane) { return j * 16 + lane / 4 * 2 + 1; }

  __device__ __forceinline__ void load_queries(const unsigned char* queries, int lane) {
    const unsigned char* own = queries + (lane / 4) * Q_PITCH + (lane % 4) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 four = *reinterpret_cast<const uint2*>(own + i * 32);
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
  __device__ __forceinline__ void multiply_values(float (&o)[8][4], const float (&p)[4], uint32_t tile, int warp,
                                                  int lane, const uint32_t (&keep)[2]) const {
    const uint32_t b0 = transpose_8x8(pack_f16(p[0], p[1])), b1 = transpose_8x8(pack_f16(p[2], p[3]));
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t r[4], a[4];
      ldmatrix_x4_trans(r, chunk_address(tile, row, j + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unpack_e4m3(__byte_perm(r[2 * i], 0, 0x3120), a[0], a[1]);
        unpack_e4m3(__byte_perm(r[2 * i + 1], 0, 0x3120), a[2], a[3]);
        a[0] &= keep[0], a[1] &= keep[0], a[2] &= keep[1], a[3] &= keep[1];
        mma_m16n8k16_f16(o[j + i], a, b0, b1);
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

// Folds the warp's 16 keys of a unit into its partial result.
template <typename Cache>
__device__ __forceinline__ void add_keys(Partial& a, const Fragments<Cache>& f, const Header& h, uint32_t k_tile,
                                         uint32_t v_tile, float qk_scale, float softcap, int warp, int lane) {
  float s[4] = {};
  f.multiply_keys(s, k_tile, warp, lane);
  const bool whole = h.low == 0 && h.valid == UNIT;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    s[c] *= qk_scale;
    if (softcap > 0.0f) s[c] = soft_cap(s[c], softcap);
    const int key = warp * 16 + lane / 4 + c / 2 * 8;
    if (!whole && (key < h.low || key >= h.valid)) s[c] = -INFINITY;
  }
  float m[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) m[c] = fmaxf(m[c], __shfl_xor_sync(~0u, m[c], offset));
  }
  if (__any_sync(~0u, m[0] > a.m[0] || m[1] > a.m[1])) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      m[c] = fmaxf(m[c], a.m[c]);
      const float alpha = exp2_approx(a.m[c] - m[c]);
      a.m[c] = m[c];
      a.l[c] *= alpha;
#pragma unroll
      for (int j = 0; j < 8; ++j) a.o[j][c] *= alpha, a.o[j][c + 2] *= alpha;
    }
  }
  float p[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    p[c] = exp2_approx(s[c] - a.m[c % 2]);
    a.l[c % 2] += p[c];
  }
  uint32_t keep[2] = {~0u, ~0u};
  if (h.valid < UNIT) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int key = warp * 16 + c * 8 + lane % 4 * 2;
      keep[c] = (key < h.valid ? 0xFFFFu : 0u) | (key + 1 < h.valid ? 0xFFFF0000u : 0u);
    }
  }
  f.multiply_values(a.o, p, v_tile, warp, lane, keep);
}

// ---- a stream's end ----------------------------------------------------------------------------------------------

// Where a thread of the end works: a head, and 8 of its dimensions, part·4 and 64 + part·4 on.
struct Place {
  int head, part;
  __device__ Place() : head(threadIdx.x / 16), part(threadIdx.x % 16) {}
};

__device__ __forceinline__ float weight(float m, float maximum) { return m == -INFINITY ? 0.0f : exp2_approx(m - maximum); }

// The warps' results of this share as one: the place's dimensions, not normalised, with maximum and sum. The last
// stage's tiles serve as the buffer; nothing else of them is read any more.
template <typename Cache>
__device__ __forceinline__ void merge_warps(Partial& a, const DecodeRing<Cache>& ring, float* buffer, const Place& at,
                                            float4 (&o)[2], float& maximum, float& sum, int warp, int lane) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) a.l[c] += __shfl_xor_sync(~0u, a.l[c], offset);
    if (lane < 4) ring.stats[warp * HEADS + lane * 2 + c] = make_float2(a.m[c], a.l[c]);
  }
  named_barrier(1, CONSUMER_THREADS);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int head = lane % 4 * 2 + c;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < CONSUMERS; ++w) top = fmaxf(top, ring.stats[w * HEADS + head].x);
    const float scale = weight(a.m[c], top);
    float* own = buffer + (warp * HEADS + head) * HEAD_DIM;
    const int twist = head / 2 * 8;  // lanes of a quad would meet in a bank
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      own[Fragments<Cache>::dimension_a(j, lane) ^ twist] = a.o[j][c] * scale;
      own[Fragments<Cache>::dimension_b(j, lane) ^ twist] = a.o[j][c + 2] * scale;
    }
  }
  named_barrier(1, CONSUMER_THREADS);
  maximum = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int w = 0; w < CONSUMERS; ++w) maximum = fmaxf(maximum, ring.stats[w * HEADS + at.head].x);
  o[0] = o[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < CONSUMERS; ++w) {
    const float2 stat = ring.stats[w * HEADS + at.head];
    sum += stat.y * weight(stat.x, maximum);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int d = (i * 64 + at.part * 4) ^ (at.head / 2 * 8);
      const float4 x = *reinterpret_cast<const float4*>(buffer + (w * HEADS + at.head) * HEAD_DIM + d);
      o[i].x += x.x, o[i].y += x.y, o[i].z += x.z, o[i].w += x.w;
    }
  }
}

// Which of a CTA's two slots of partial results a share of the stream lies in.
__device__ __forceinline__ int partial_slot(int cta, const Header& h) {
  return 2 * cta + (cta == h.first_cta && !h.start_aligned ? 1 : 0);
}

// Leaves this share's result in memory. True in the CTA that is the last of the stream to do so, which then holds the sum.
__device__ __forceinline__ bool combine_shares(const DecodeArguments& g, const Header& h, const Place& at, int* flag,
                                               float4 (&o)[2], float& maximum, float& sum) {
  const bool used = at.head < g.group;
  const int slot = partial_slot(blockIdx.x, h);
  if (used) {
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    float* own = g.partial + (static_cast<int64_t>(slot) * g.group + at.head) * HEAD_DIM + at.part * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float4*>(own + i * 64) =
          make_float4(o[i].x * inverse, o[i].y * inverse, o[i].z * inverse, o[i].w * inverse);
    }
    if (at.part == 0) g.partial_lse[slot * g.group + at.head] = sum > 0.0f ? maximum + log2f(sum) : -INFINITY;
  }
  __threadfence();
  named_barrier(1, CONSUMER_THREADS);
  if (threadIdx.x == 0) {
    int* arrivals = g.arrivals + h.row * g.kv_heads + h.head;
    const bool last = atomic_add_acq_rel(arrivals, 1) == h.last_cta - h.first_cta;
    if (last) *arrivals = 0;
    *flag = last;
  }
  named_barrier(1, CONSUMER_THREADS);
  if (!*flag) return false;
  __threadfence();
  maximum = -INFINITY, sum = 0.0f;
  o[0] = o[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (!used) return true;
#pragma unroll 4
  for (int cta = h.first_cta; cta <= h.last_cta; ++cta) {
    maximum = fmaxf(maximum, load_float(g.partial_lse + partial_slot(cta, h) * g.group + at.head));
  }
#pragma unroll 4
  for (int cta = h.first_cta; cta <= h.last_cta; ++cta) {
    const int64_t from = static_cast<int64_t>(partial_slot(cta, h)) * g.group + at.head;
    const float w = weight(load_float(g.partial_lse + from), maximum);
    sum += w;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = load_float4(g.partial + from * HEAD_DIM + at.part * 4 + i * 64);
      o[i].x += w * x.x, o[i].y += w * x.y, o[i].z += w * x.z, o[i].w += w * x.w;
    }
  }
  return true;
}

__device__ __forceinline__ void write_output(const DecodeArguments& g, const Header& h, const Place& at,
                                             const float4 (&o)[2], float maximum, float sum) {
  if (at.head >= g.group) return;
  const int head = h.head * g.group + at.head;
  float scale = g.v_scale != nullptr ? g.v_scale[h.head] : 1.0f;
  if (g.sinks != nullptr) {
    const float sink = g.sinks[head] * LOG2E, top = fmaxf(maximum, sink);
    const float kept = weight(maximum, top);
    sum = sum * kept + exp2_approx(sink - top);
    scale *= kept;
  }
  scale = sum > 0.0f ? scale / sum : 0.0f;
  __nv_bfloat16* out = g.out + static_cast<int64_t>(h.row) * g.out_stride + head * HEAD_DIM + at.part * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<uint2*>(out + i * 64) =
        make_uint2(pack_bf16(o[i].x * scale, o[i].y * scale), pack_bf16(o[i].z * scale, o[i].w * scale));
  }
}

template <typename Cache>
__device__ __forceinline__ void consume(const DecodeArguments& g, const DecodeRing<Cache>& ring, int warp, int lane) {
  Partial a;
  Fragments<Cache> f;
  const Place at;
  int stage = 0;
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
      f.load_queries(ring.q + stage * Q_BYTES, lane);
      if (g.k_scale != nullptr) qk_scale = g.scale_log2 * g.k_scale[h.head];
    }
    const uint32_t k_tile = ring.data_address + stage * DecodeRing<Cache>::stage_bytes;
    if (h.valid > warp * 16 && h.low < warp * 16 + 16) {
      add_keys(a, f, h, k_tile, k_tile + DecodeRing<Cache>::tile_bytes, qk_scale, g.softcap, warp, lane);
    }
    float4 o[2];
    float maximum, sum;
    if (h.flags & LAST) {
      float* buffer = reinterpret_cast<float*>(ring.data + stage * DecodeRing<Cache>::stage_bytes);
      merge_warps(a, ring, buffer, at, o, maximum, sum, warp, lane);
      proxy_fence_async();  // the next copy into this stage comes after the buffer's reads and writes
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
    if (h.flags & LAST) {
      const bool whole = h.first_cta == h.last_cta || combine_shares(g, h, at, ring.flag, o, maximum, sum);
      if (whole) write_output(g, h, at, o, maximum, sum);
    }
    if (h.flags & STOP) return;
    if (++stage == g.stages) stage = 0, parity ^= 1;
  }
}

template <typename Cache>
__device__ __forceinline__ void sm90_decode(const CUtensorMap& k_map, const CUtensorMap& v_map,
                                            const DecodeArguments& g) {
  extern __shared__ unsigned char raw[];
  const DecodeRing<Cache> ring(raw, g.stages);
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
    produce<Cache>(k_map, v_map, g, ring, lane);
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
