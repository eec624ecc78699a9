// Prefill attention over a paged bf16 cache: causal, ragged chunks, head dimension 128 (FlashAttention-3, Shah et al.
// 2024: warp specialisation, two consumer warpgroups in turns, the next QKᵀ under the softmax).
//
// A tile is 128 rows, ⌊128 / group⌋ tokens times the query heads of one KV head, so that K and V are read once per group
// and the diagonal wastes little. Persistent CTAs draw tiles by ticket, the longest first: one producer warp loads Q, K and
// V by TMA, a tile ahead of two consumer warpgroups of 64 rows each. Keys go from the last to the first, 128 at a time;
// where their number of 64s is odd, the first block, which holds the diagonal, is 64 wide.
//
// Row r of the batch owns the tiles from ⌊start_r / tokens⌋ + r on, as in triton_prefill.py.
#pragma once
#include <cuda.h>

#include "attention_ptx.cuh"
#include "tile_softmax.cuh"
#include "wgmma.cuh"

namespace stoker {

constexpr int TILE_ROWS = 128;
constexpr int BLOCK_KEYS = 128;
constexpr int HALF_KEYS = 64;
constexpr int DIMENSIONS = 128;
constexpr int WARPGROUP = 128;                             // threads
constexpr int HALF_BYTES = 128 * 128;                      // 128 rows of 64 dimensions: Q, K or V
constexpr int TILE_BYTES = 2 * HALF_BYTES;
constexpr int RING = 2;                                    // of each: Q, K, V
constexpr int TICKET_INTS = 8;
constexpr int PREFILL_THREADS = 3 * WARPGROUP;
constexpr int PREFILL_SHARED = 1024 + 3 * RING * TILE_BYTES + RING * TICKET_INTS * 4 + 6 * RING * 8;

// The launcher mirrors this in sm90_prefill.py.
struct PrefillArguments {
  __nv_bfloat16* out;
  const int* page_table;
  const int* seq_slots;
  const int* query_start;  // of the chunks; token numbers of the whole step
  const int* seq_lens;
  int* tickets;            // next tile, CTAs that are done; zero between launches
  float scale_log2;
  int rows, tokens, first_token, tiles, kv_heads, group, out_stride, table_stride, page_shift, page_rows, head_rows, box_rows;
};

// A tile as the consumers see it.
struct Tile {
  int head, token, count;  // its first token, and how many are real
  int position;            // of the first token, among the row's keys
  int keys, seq_len;       // keys [0, keys) are read; 0: the output is zero
  int stop;
};

struct PrefillRing {
  unsigned char* q;
  int* tickets;
  uint32_t q_address, k_address, v_address, barriers;

  // [Q][K][V], RING tiles each, on a multiple of 1024; [tickets]; [full, empty] of Q, of K, of V.
  __device__ explicit PrefillRing(unsigned char* raw) {
    const uint32_t start = shared_address(raw);
    q_address = (start + 1023) & ~1023u;
    q = raw + (q_address - start);
    k_address = q_address + RING * TILE_BYTES;
    v_address = k_address + RING * TILE_BYTES;
    tickets = reinterpret_cast<int*>(q + 3 * RING * TILE_BYTES);
    barriers = v_address + RING * TILE_BYTES + RING * TICKET_INTS * 4;
  }
  __device__ uint32_t full(int which, int stage) const { return barriers + ((which * 2 + 0) * RING + stage) * 8; }
  __device__ uint32_t empty(int which, int stage) const { return barriers + ((which * 2 + 1) * RING + stage) * 8; }
};
constexpr int OF_Q = 0, OF_K = 1, OF_V = 2;

struct Turn {
  int stage = 0;
  uint32_t parity;
  __device__ explicit Turn(uint32_t parity) : parity(parity) {}
  __device__ __forceinline__ void next() {
    if (++stage == RING) stage = 0, parity ^= 1;
  }
};

// ---- producer ----------------------------------------------------------------------------------------------------

// The tile of a ticket; `keys` −1 where it is nobody's.
__device__ __forceinline__ Tile find_tile(const PrefillArguments& g, int ticket, int lane, int& slot) {
  const int tokens = TILE_ROWS / g.group, tile = g.tiles - 1 - ticket / g.kv_heads;
  int below = 0;
  for (int first = 0; first <= g.rows; first += 32) {
    const int row = first + lane;
    const bool owned = row <= g.rows && (load_int(g.query_start + min(row, g.rows)) - g.first_token) / tokens + row <= tile;
    below += __popc(__ballot_sync(~0u, owned));
  }
  const int row = below - 1, start = load_int(g.query_start + row);
  const bool real = row < g.rows;
  const int end = real ? load_int(g.query_start + row + 1) : g.tokens;
  const int seq_len = real ? load_int(g.seq_lens + row) : 0;
  slot = real ? load_int(g.seq_slots + row) : 0;
  const int first = (tile - ((start - g.first_token) / tokens + row)) * tokens;
  const int position = seq_len - (end - start) + first, count = min(tokens, end - start - first);
  return {ticket % g.kv_heads, start + first, count, position, count <= 0 ? -1 : real ? position + count : 0, seq_len, 0};
}

__device__ __forceinline__ void prefill_produce(const CUtensorMap& q_map, const CUtensorMap& k_map,
                                                const CUtensorMap& v_map, const PrefillArguments& g,
                                                const PrefillRing& ring, int lane) {
  const uint64_t keep = policy_evict_last();
  grid_dependency_wait();
  proxy_fence_async_global();
  const int boxes_per_block = BLOCK_KEYS / g.box_rows, q_rows = TILE_ROWS / g.group * g.group;
  Turn q_turn(1), kv_turn(1);
  while (true) {
    int ticket = lane == 0 ? atomic_add_acq_rel(g.tickets, 1) : 0, slot = 0;
    ticket = __shfl_sync(~0u, ticket, 0);
    Tile tile{};
    tile.stop = ticket >= g.tiles * g.kv_heads;
    if (!tile.stop) {
      tile = find_tile(g, ticket, lane, slot);
      if (tile.keys < 0) continue;
    }
    mbarrier_wait(ring.empty(OF_Q, q_turn.stage), q_turn.parity);
    if (lane == 0) {
      int4* header = reinterpret_cast<int4*>(ring.tickets + q_turn.stage * TICKET_INTS);
      header[0] = make_int4(tile.head, tile.token, tile.count, tile.position);
      header[1] = make_int4(tile.keys, tile.seq_len, tile.stop, 0);
      mbarrier_arrive_expect(ring.full(OF_Q, q_turn.stage), tile.keys > 0 ? q_rows * 256 : 0);
    }
    __syncwarp();
    if (tile.keys > 0 && lane < 2) {
      tensor_load_3d(ring.q_address + q_turn.stage * TILE_BYTES + lane * HALF_BYTES, &q_map, lane * 64,
                     tile.head * g.group, tile.token, ring.full(OF_Q, q_turn.stage));
    }
    q_turn.next();
    if (tile.stop) return;
    // Pages of 32 boxes, one per lane, from `cached` on.
    const int boxes = (tile.seq_len + g.box_rows - 1) / g.box_rows;
    int cached = 1 << 30, page = 0;
    const int halves = (tile.keys + HALF_KEYS - 1) / HALF_KEYS;
    int from = halves % 2 ? (halves - 1) * HALF_KEYS : (halves - 2) * HALF_KEYS;
    for (int width = halves % 2 ? HALF_KEYS : BLOCK_KEYS; from >= 0; from -= BLOCK_KEYS, width = BLOCK_KEYS) {
      const int first = from / g.box_rows, count = min(width / g.box_rows, boxes - first);
      if (first < cached) {
        cached = max(0, first + boxes_per_block - 32);
        const int key = (cached + lane) * g.box_rows;
        page = cached + lane < boxes
                   ? load_int(g.page_table + static_cast<int64_t>(slot) * g.table_stride + (key >> g.page_shift))
                   : 0;
      }
      // Lane: (box, half of a row's bytes).
      const int box = lane / 2, half = lane % 2, key = from + box * g.box_rows;
      const int row = __shfl_sync(~0u, page, first + box - cached) * g.page_rows + tile.head * g.head_rows +
                      (key & ((1 << g.page_shift) - 1));
      const int offset = kv_turn.stage * TILE_BYTES + half * HALF_BYTES + box * g.box_rows * 128;
#pragma unroll
      for (int which = OF_K; which <= OF_V; ++which) {
        mbarrier_wait(ring.empty(which, kv_turn.stage), kv_turn.parity);
        const uint32_t barrier = ring.full(which, kv_turn.stage);
        if (lane == 0) mbarrier_arrive_expect(barrier, count * g.box_rows * 256);
        __syncwarp();
        if (box < count) {
          tensor_load_2d((which == OF_K ? ring.k_address : ring.v_address) + offset, which == OF_K ? &k_map : &v_map,
                         half * 64, row, barrier, keep);
        }
      }
      kv_turn.next();
    }
  }
}

// ---- consumers ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void issue_keys(float (&s)[64], uint32_t q, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t offset = step / 4 * HALF_BYTES + step % 4 * 32;
    Wgmma<__nv_bfloat16, 128>::multiply(s, wgmma_descriptor(q + offset), wgmma_descriptor(k + offset), step != 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void issue_keys(float (&s)[32], uint32_t q, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t offset = step / 4 * HALF_BYTES + step % 4 * 32;
    Wgmma<__nv_bfloat16, 64>::multiply(s, wgmma_descriptor(q + offset), wgmma_descriptor(k + offset), step != 0);
  }
  wgmma_commit();
}

template <int steps>
__device__ __forceinline__ void issue_values(float (&o)[64], const uint32_t (&p)[steps][4], uint32_t v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    WgmmaRegisters<__nv_bfloat16, 128, true>::multiply(o, p[step], wgmma_descriptor_columns(v + step * 2048, HALF_BYTES), true);
  }
  wgmma_commit();
}

// Rows of V that hold no key of the sequence may hold anything: 0 · NaN is NaN. Both warpgroups write the same zeros.
__device__ __forceinline__ void clear_values(unsigned char* v, int first, int end, int thread) {
  for (int i = first * 16 + thread; i < end * 16; i += WARPGROUP) {
    *reinterpret_cast<uint4*>(v + i % 16 / 8 * HALF_BYTES + i / 16 * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  proxy_fence_async();
}

// Writes the tile's rows of this warpgroup, through the memory of its queries.
__device__ __forceinline__ void write_tile(const PrefillArguments& g, const Tile& tile, unsigned char* staging,
                                           const float (&o)[64], const float (&scale)[2], int group_row, int warp,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = warp * 16 + lane / 4 + i % 2 * 8, chunk = i / 2;
    const float factor = scale[i % 2];
    *reinterpret_cast<uint32_t*>(staging + chunk / 8 * HALF_BYTES + row * 128 + ((chunk % 8 ^ row % 8) << 4) + lane % 4 * 4) =
        pack_bf16(o[2 * i] * factor, o[2 * i + 1] * factor);
  }
  __syncwarp();
  const int inverse = (65536 + g.group - 1) / g.group;  // exact for rows below 128
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = warp * 16 + i * 2 + lane / 16, chunk = lane % 16;
    const int token = (group_row + row) * inverse >> 16, head = group_row + row - token * g.group;
    if (token >= tile.count) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(staging + chunk / 8 * HALF_BYTES + row * 128 +
                                                        ((chunk % 8 ^ row % 8) << 4));
    *reinterpret_cast<uint4*>(g.out + static_cast<int64_t>(tile.token + token) * g.out_stride +
                              (tile.head * g.group + head) * DIMENSIONS + chunk * 8) = value;
  }
}

// The warpgroups take turns at the tensor cores: one's products run under the other's softmax.
template <int group>
__device__ __forceinline__ void wait_turn() {
  named_barrier(1 + group, 2 * WARPGROUP);
}
template <int group>
__device__ __forceinline__ void end_turn() {
  named_barrier_arrive<2 - group>(2 * WARPGROUP);
}

// The first block, of 64 or 128 keys: its weights, with nothing to overlap with.
template <int count, int group>
__device__ __forceinline__ void first_weights(float (&s)[count], uint32_t (&p)[count / 8][4], RowState& a, uint32_t q,
                                              const PrefillRing& ring, const Turn& turn, float scale_log2, int from,
                                              bool masked, int lane) {
  mbarrier_wait(ring.full(OF_K, turn.stage), turn.parity);
  wait_turn<group>();
  issue_keys(s, q, ring.k_address + turn.stage * TILE_BYTES);
  end_turn<group>();
  wgmma_wait<0>();
  wgmma_results(s);
  if (lane == 0) mbarrier_arrive(ring.empty(OF_K, turn.stage));
  if (masked) mask_keys(s, a, from, lane);
  float alpha[2];
  softmax(s, a, alpha, scale_log2);
  pack_weights<pack_bf16>(p, s);
}

template <int group>
__device__ __forceinline__ void prefill_consume(const PrefillArguments& g, const PrefillRing& ring) {
  const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
  constexpr int group_row = group * 64;
  Turn q_turn(0), turn(0);
  grid_dependency_wait();
  if (group == 1) end_turn<1>();  // the other one begins
  const int inverse = (65536 + g.group - 1) / g.group;
  int token[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) token[r] = (group_row + warp * 16 + lane / 4 + r * 8) * inverse >> 16;
  while (true) {
    mbarrier_wait(ring.full(OF_Q, q_turn.stage), q_turn.parity);
    const int4* header = reinterpret_cast<const int4*>(ring.tickets + q_turn.stage * TICKET_INTS);
    const int4 x = header[0], y = header[1];
    const Tile tile{x.x, x.y, x.z, x.w, y.x, y.y, y.z};
    if (tile.stop) return;
    float o[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    RowState a;
#pragma unroll
    for (int r = 0; r < 2; ++r) a.m[r] = -INFINITY, a.l[r] = 0.0f, a.limit[r] = tile.position + token[r];
    const uint32_t q = ring.q_address + q_turn.stage * TILE_BYTES + group_row * 128;
    if (tile.keys > 0) {
      const int halves = (tile.keys + HALF_KEYS - 1) / HALF_KEYS;
      int from = (halves % 2 ? halves - 1 : halves - 2) * HALF_KEYS;
      const int width = halves % 2 ? HALF_KEYS : BLOCK_KEYS;
      uint32_t p[8][4];
      if (halves % 2) {
        float s[32];
        uint32_t narrow[4][4];
        first_weights<32, group>(s, narrow, a, q, ring, turn, g.scale_log2, from, true, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) p[i][c] = i < 4 ? narrow[i % 4][c] : 0;
        }
      } else {
        float s[64];
        first_weights<64, group>(s, p, a, q, ring, turn, g.scale_log2, from, true, lane);
      }
      // Keys of no sequence and, beyond a block of 64, whatever was there before.
      const int valid = min(tile.seq_len - from, width);
      mbarrier_wait(ring.full(OF_V, turn.stage), turn.parity);
      if (valid < BLOCK_KEYS) {
        clear_values(ring.q + (ring.v_address - ring.q_address) + turn.stage * TILE_BYTES, valid, BLOCK_KEYS, thread);
        named_barrier(3 + group, WARPGROUP);
      }
      for (from -= BLOCK_KEYS; from >= 0; from -= BLOCK_KEYS) {
        Turn next = turn;
        next.next();
        float s[64], alpha[2];
        mbarrier_wait(ring.full(OF_K, next.stage), next.parity);
        mbarrier_wait(ring.full(OF_V, turn.stage), turn.parity);
        wait_turn<group>();
        issue_keys(s, q, ring.k_address + next.stage * TILE_BYTES);
        issue_values(o, p, ring.v_address + turn.stage * TILE_BYTES);
        end_turn<group>();
        wgmma_wait<1>();
        wgmma_results(s);
        if (lane == 0) mbarrier_arrive(ring.empty(OF_K, next.stage));
        if (from + BLOCK_KEYS - 1 > tile.position) mask_keys(s, a, from, lane);
        softmax(s, a, alpha, g.scale_log2);
        wgmma_wait<0>();
        wgmma_results(o);
        if (lane == 0) mbarrier_arrive(ring.empty(OF_V, turn.stage));
        rescale(o, alpha);
        pack_weights<pack_bf16>(p, s);
        turn = next;
      }
      mbarrier_wait(ring.full(OF_V, turn.stage), turn.parity);
      issue_values(o, p, ring.v_address + turn.stage * TILE_BYTES);
      wgmma_wait<0>();
      wgmma_results(o);
      if (lane == 0) mbarrier_arrive(ring.empty(OF_V, turn.stage));
      turn.next();
    }
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = a.l[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      scale[r] = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
    named_barrier(3 + group, WARPGROUP);  // every warp is done with the queries
    write_tile(g, tile, ring.q + q_turn.stage * TILE_BYTES + group_row * 128, o, scale, group_row, warp, lane);
    proxy_fence_async();  // the next copy into this stage comes after the staging's reads and writes
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty(OF_Q, q_turn.stage));
    q_turn.next();
  }
}

__device__ __forceinline__ void sm90_prefill(const CUtensorMap& q_map, const CUtensorMap& k_map,
                                             const CUtensorMap& v_map, const PrefillArguments& g) {
  extern __shared__ unsigned char raw[];
  const PrefillRing ring(raw);
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&q_map);
    tensor_map_prefetch(&k_map);
    tensor_map_prefetch(&v_map);
    for (int which = OF_Q; which <= OF_V; ++which) {
      for (int stage = 0; stage < RING; ++stage) {
        mbarrier_init(ring.full(which, stage), 1);
        mbarrier_init(ring.empty(which, stage), 8);  // consumer warps
      }
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
  const int role = threadIdx.x / WARPGROUP;
  if (role == 0) {
    registers_decrease<24>();
    if (threadIdx.x < 32) {
      prefill_produce(q_map, k_map, v_map, g, ring, threadIdx.x);
      // Every CTA has drawn its last ticket when the last one comes by here.
      if (threadIdx.x == 0 && atomic_add_acq_rel(g.tickets + 1, 1) == static_cast<int>(gridDim.x) - 1) {
        g.tickets[0] = 0;
        g.tickets[1] = 0;
      }
    }
  } else if (role == 1) {
    registers_increase<240>();
    prefill_consume<0>(g, ring);
  } else {
    registers_increase<240>();
    prefill_consume<1>(g, ring);
  }
}

}  // namespace stoker
