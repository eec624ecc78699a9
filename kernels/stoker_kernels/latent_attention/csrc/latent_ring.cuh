// What the warps of `sm90_latent` share: the arguments, and the ring in shared memory with what brings keys into it.
#pragma once
#include <cuda.h>

#include "attention_ptx.cuh"
#include "wgmma.cuh"

namespace stoker {

constexpr int RANK = 512;                           // dimensions of a latent, which are value and key
constexpr int TILE_HEADS = 64, TILE_KEYS = 64;
constexpr int CHUNKS = 9, VALUE_CHUNKS = RANK / 64;  // of 64 dimensions: the latent's, then those that rotate
constexpr int CHUNK_BYTES = 64 * 128;               // 64 heads or keys
constexpr int TILE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int BUFFERS = 2;                          // of keys; one's even tiles are one warpgroup's
constexpr int HALVES = 2, HALF_CHUNKS = VALUE_CHUNKS / 2;  // chunks of values that one warpgroup multiplies
constexpr int WARPGROUP = 128;                      // threads
constexpr int LATENT_THREADS = 3 * WARPGROUP;
constexpr int HEADER_INTS = 8, ITEM_INTS = 8;
constexpr int STATE_FLOATS = (BUFFERS + 2 * 2) * TILE_HEADS;
constexpr int BARRIERS = 2 + BUFFERS * (2 * HALVES + 1);
constexpr int LATENT_SHARED = 1024 + (1 + BUFFERS) * TILE_BYTES + HEADER_INTS * 4 + STATE_FLOATS * 4 + BARRIERS * 8;

// The launcher mirrors this in sm90_latent.py.
struct LatentArguments {
  __nv_bfloat16* out;     // [rows, heads, RANK]
  float* partial;         // [items, heads, RANK]
  float* partial_lse;     // [items, heads], in units of log2
  const int* page_table;
  const int* items;       // row, slot, first key, end, the row's first item, how many it has; and by row, 6 and 7: the last two
  const int* parts;       // of ITEM_INTS each: its first item; the next one's is its end
  // Of chunks' context, instead of a plan:
  float* lse;             // [tokens, heads], in units of log2; −∞ where nothing is written
  const int* seq_slots;   // of the chunks, as the next two
  const int* query_start;  // token numbers of the whole step
  const int* seq_lens;
  float scale_log2;
  int rows, tokens, first_token, heads, head_tiles, group, table_stride, page_shift, page_rows, box_rows;
};

// What a cache holds, and what products are of. Of bf16 they are the same.
struct bf16_latents {
  using Element = __nv_bfloat16;
  static constexpr bool widened = false;
  static constexpr int full_arrivals = 1;  // of a half of a buffer: who asks for its copy
  static constexpr int producer_registers = 72, consumer_registers = 216;  // all start with 168
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  static __device__ __forceinline__ float scale_log2(const LatentArguments& g, float) { return g.scale_log2; }
  static __device__ __forceinline__ float value_scale(float) { return 1.0f; }
};

// e4m3 in units of `cache_scale`, which f16 holds as it is; queries and weights are rounded to f16 too.
struct e4m3_latents {
  using Element = __half;
  static constexpr bool widened = true;
  static constexpr int full_arrivals = 4;  // the warps that write it
  static constexpr int producer_registers = 88, consumer_registers = 208;
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_f16(low, high); }
  static __device__ __forceinline__ float scale_log2(const LatentArguments& g, float cache_scale) {
    return g.scale_log2 * cache_scale;
  }
  static __device__ __forceinline__ float value_scale(float cache_scale) { return cache_scale; }
};

// An item as the consumers see it: 64 queries, of `tokens` tokens and `group` heads each. `place` −1 where they see their
// keys here alone, else where their part of the sum goes.
struct Item {
  int token, first_head, keys, place, tokens, stop;
};

struct LatentRing {
  unsigned char* q;
  int* header;
  float* greatest;  // [buffer][head]: the greatest logit up to a tile
  float* sums;      // [parity of the item][warpgroup][head]: of weights
  uint32_t q_address, keys_address, barriers;
  int ctas;  // of the cluster, which have the same keys

  // [Q][keys] on a multiple of 1024; [header][greatest][sums]; [full, empty] of Q, [full, full, empty, empty, weights] a
  // buffer. Warpgroup b multiplies its half of buffer b's values first, so that this half, the `early` one, is free before
  // the other one, which has the rotated part besides.
  __device__ explicit LatentRing(unsigned char* raw, bool alone) {
    ctas = alone ? 1 : cluster_size();
    const uint32_t start = shared_address(raw);
    q_address = (start + 1023) & ~1023u;
    q = raw + (q_address - start);
    keys_address = q_address + TILE_BYTES;
    header = reinterpret_cast<int*>(q + (1 + BUFFERS) * TILE_BYTES);
    greatest = reinterpret_cast<float*>(header + HEADER_INTS);
    sums = greatest + BUFFERS * TILE_HEADS;
    barriers = q_address + (1 + BUFFERS) * TILE_BYTES + HEADER_INTS * 4 + STATE_FLOATS * 4;
  }
  __device__ uint32_t q_full() const { return barriers; }
  __device__ uint32_t q_empty() const { return barriers + 8; }
  __device__ uint32_t of_buffer(int buffer, int which) const { return barriers + 16 + (buffer * (2 * HALVES + 1) + which) * 8; }
  __device__ uint32_t full(int buffer, bool early) const { return of_buffer(buffer, early); }
  __device__ uint32_t empty(int buffer, bool early) const { return of_buffer(buffer, HALVES + early); }
  __device__ uint32_t weights(int buffer) const { return of_buffer(buffer, 2 * HALVES); }
  __device__ uint32_t keys(int buffer) const { return keys_address + buffer * TILE_BYTES; }
  __device__ unsigned char* keys_memory(int buffer) const { return q + (1 + buffer) * TILE_BYTES; }

  __device__ void initialise(int full_arrivals) const {
    mbarrier_init(q_full(), 1);
    mbarrier_init(q_empty(), 8);  // consumer warps
    for (int buffer = 0; buffer < BUFFERS; ++buffer) {
      for (int half = 0; half < HALVES; ++half) {
        mbarrier_init(full(buffer, half), full_arrivals);
        mbarrier_init(empty(buffer, half), 4 * ctas);  // warps of one group
      }
      mbarrier_init(weights(buffer), 4);  // warps of the group whose tile it is
    }
    mbarrier_init_fence();
  }
  // A warp is done with its half of a buffer, which every CTA of the cluster writes to.
  __device__ __forceinline__ void release(int buffer, bool early, int lane) const {
    if (ctas == 1) {
      if (lane == 0) mbarrier_arrive(empty(buffer, early));
    } else if (lane < ctas) {
      mbarrier_arrive_cluster(cluster_address(empty(buffer, early), lane));
    }
  }
};

// Pages of 32 boxes of a row, one per lane, from box `cached` on.
struct PageWindow {
  int cached = 0, page = 0;

  __device__ __forceinline__ void load(const LatentArguments& g, int slot, int start, int end, int first, int lane) {
    cached = first;
    const int key = start + (first + lane) * g.box_rows;
    page = key < end ? load_int(g.page_table + static_cast<int64_t>(slot) * g.table_stride + (key >> g.page_shift)) : 0;
  }
};

// Half of a tile of keys, free to be written; pages past `end` are not read. In a cluster each CTA reads its share of the
// boxes for all.
__device__ __forceinline__ void load_half(const CUtensorMap& map, const LatentArguments& g, const LatentRing& ring,
                                          const PageWindow& pages, int buffer, bool early, int start, int from, int end,
                                          int lane, uint64_t policy) {
  const int boxes = (min(TILE_KEYS, end - from) + g.box_rows - 1) / g.box_rows, rank = cluster_rank();
  const int first_chunk = (early ? buffer : buffer ^ 1) * HALF_CHUNKS, all = boxes * (early ? HALF_CHUNKS : HALF_CHUNKS + 1);
  const uint32_t barrier = ring.full(buffer, early);
  if (lane == 0) mbarrier_arrive_expect(barrier, all * g.box_rows * 128);
  __syncwarp();
  for (int i = 0; i < all; i += 32) {
    const int place = (i + lane) / boxes, box = i + lane - place * boxes, key = from + box * g.box_rows;
    const int page = __shfl_sync(~0u, pages.page, (from - start) / g.box_rows + box - pages.cached);
    if (i + lane >= all) continue;
    const int chunk = place < HALF_CHUNKS ? first_chunk + place : VALUE_CHUNKS;
    const int row = page * g.page_rows + (key & ((1 << g.page_shift) - 1));
    const uint32_t to = ring.keys(buffer) + chunk * CHUNK_BYTES + box * g.box_rows * 128;
    if (ring.ctas == 1) {
      tensor_load_2d(to, &map, chunk * 64, row, barrier, policy);
    } else if ((i + lane) % ring.ctas == rank) {
      tensor_multicast_2d(to, &map, chunk * 64, row, barrier, static_cast<uint16_t>((1 << ring.ctas) - 1), policy);
    }
  }
}

}  // namespace stoker
