// What the warps of sm90_decode share: the arguments, a share of the line, a unit's header, the ring in shared memory.
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
constexpr float SLACK = 8.0f;  // how far logits may exceed a stream's running maximum, as powers of two
constexpr float LOG2E = 1.4426950408889634f;

struct bf16_cache {
  static constexpr int row_bytes = 256, halves = 2;  // a TMA box is 128 bytes wide
};
struct e4m3_cache {
  static constexpr int row_bytes = 128, halves = 1;
};

// The launcher mirrors this in sm90_decode.py.
struct DecodeArguments {
  __nv_bfloat16* out;
  const __nv_bfloat16* q;
  const int* page_table;
  const int* seq_lens;
  const int* seq_slots;
  const int* shares;  // [num_shares, 8]
  int* tickets;       // shares drawn, CTAs that are done; zero between launches
  float* partial;     // [2 · num_shares, group, 128]
  float* partial_lse; // [2 · num_shares, group]
  int* arrivals;      // [rows, KV heads], zero between launches
  const float* k_scale;
  const float* v_scale;
  const float* sinks;
  const float* before;      // [parts, rows, query heads, 128]: attention to keys before those of the page table,
  const float* before_lse;  // [parts, rows, query heads]: normalised, without v_scale; its log₂-sum-exp
  float scale_log2, softcap;
  int window, plan_window, rows, kv_heads, group, q_stride, out_stride, table_stride;
  int page_shift, page_rows, head_rows, box_rows, stages, num_shares, settled, parts;
  int fresh;  // keys at a row's end that the kernels before may still write, at most
};

// Work for a CTA: `units` units from (row, head, block) on; blocks count units from the row's first key on. Shares are
// `per_cta` units of the line each, or, where that is 0, keep streams whole: a stream belongs to the share that its
// first unit lies in. `tail`: CTAs that are done draw further shares.
struct Share {
  int row, slot, head, block, units, len, per_cta, tail, index;
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
// no keys: the share is over; STOP: the CTA's work is. TILE: the first unit of a tile of prefill queries.
constexpr int FIRST = 1, LAST = 2, STARTS = 4, END = 8, STOP = 16, TILE = 32;

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

  // [stages of K and V][exchange][queries][headers][full barriers][empty barriers][last]; sm90_decode.py reserves it.
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

// Readies the ring's barriers, with all threads of the CTA.
template <typename Cache>
__device__ __forceinline__ void start_ring(const DecodeRing<Cache>& ring, const CUtensorMap& k_map,
                                           const CUtensorMap& v_map, int stages) {
  if (threadIdx.x == CONSUMER_THREADS) {
    tensor_map_prefetch(&k_map);
    tensor_map_prefetch(&v_map);
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
}

__device__ __forceinline__ int first_block(int len, int window) {
  return window > 0 ? max(len - window, 0) / UNIT : 0;
}

__device__ __forceinline__ int end_block(int len, int first) { return max((len + UNIT - 1) / UNIT, first + 1); }

}  // namespace stoker
