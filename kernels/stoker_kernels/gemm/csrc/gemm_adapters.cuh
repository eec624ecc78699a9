// What adapters add to a tile: B · s, where s = A · x was computed before (lora/csrc), each token with its own adapter's B.
//
// A pair is an adapter of the step and 16 of its ranks. Behind the k blocks of a tile the ring carries the tile's rows of
// B of each pair, several a stage, as a further part of K: they stream as W does. A warp multiplies its 16 rows of them
// with all tokens, where s is zero for the tokens of others: their sums stay as they are, bit for bit. Of a tile that
// several CTAs share, a pair's slot decides which of them adds it. So a token's bits do not depend on who is beside it.
// B is finite, or 0 · B would be none.
#pragma once
#include <cuda.h>

#include "gemm_epilogue.cuh"

namespace stoker {

struct PairList;
struct TileOfLane;
template <int MT, bool GATED>
struct AdapterTokens;

struct NoAdapters {
  template <int MT, bool GATED>
  struct Tokens {
    __device__ Tokens(const NoAdapters&, int, PairList*) {}
  };
  struct Tile {
    __device__ void load_slot(const NoAdapters&) {}
    __device__ void load_ranks(const NoAdapters&) {}
  };
  __device__ void wait_for_x() const { grid_dependency_wait(); }
  static constexpr bool present = false, planned = true;
};

constexpr int MOST_PAIRS = 32, PAIR_RANKS = 16;

// In shared memory: the pairs of a step, those of the first ranks first. [1]: those that this CTA adds to a shared tile.
// Behind it lies s. small.py reserves as much.
struct alignas(8) PairList {
  int count[2];
  int pairs[2][MOST_PAIRS];  // slot · 2^16 + which 16 ranks · 2^8 + how many of them the adapter has

  __device__ static int slot(int pair) { return pair >> 16; }
  __device__ static int start(int pair) { return (pair >> 8 & 255) * PAIR_RANKS; }
  __device__ static int owned(int pair) { return pair & 255; }
};

struct AdapterArguments {
  template <int MT, bool GATED>
  using Tokens = AdapterTokens<MT, GATED>;
  using Tile = TileOfLane;
  static constexpr bool present = true;
  const __nv_bfloat16* shrunk;  // s, [m][pieces][row_ranks]; where a slot has no rank it holds anything
  const int* of_token;          // [m]: the slot of each token, or -1
  const int* of_tile;           // [tiles]: slots in their order, then -1; one may stand several times; at most 32 tiles
  const int* ranks;             // by slot
  const int* turn;              // what the words hold when they are true
  const int* words;             // [x has been written][s has been written], or null: wait for the kernel before
  int row_ranks, pieces, tiles;
  int ends[2];  // the first rows of the second and the third piece
  int planned;  // of_token, of_tile, ranks and turn may be read before the kernel before has ended

  __device__ void wait_for_x() const { words ? wait_for_word(words, *turn) : grid_dependency_wait(); }
  __device__ void wait_for_s() const {
    if (words) wait_for_word(words + 1, *turn);
  }
};

// The slot of a warp's lane's tile, and that one's ranks.
struct TileOfLane {
  int slot = -1, owned = 0;

  __device__ void load_slot(const AdapterArguments& a) {
    if (threadIdx.x % 32 < a.tiles) slot = load_int(a.of_tile + threadIdx.x % 32);
  }
  __device__ void load_ranks(const AdapterArguments& a) {
    if (slot >= 0) owned = load_int(a.ranks + slot);
  }
};

// A warp writes the list. At most MOST_PAIRS pairs; `rank` of `size` CTAs that share a tile is this one.
__device__ __forceinline__ void list_pairs(const TileOfLane& tile, PairList& list, int rank, int size) {
  const int lane = threadIdx.x % 32, slot = tile.slot, last = __shfl_up_sync(~0u, slot, 1);
  const unsigned before = (1u << lane) - 1;
  const int owned = lane == 0 || last != slot ? tile.owned : 0;
  int count[2] = {0, 0};
  for (int block = 0;; ++block) {
    const int left = owned - block * PAIR_RANKS;
    const unsigned there = __ballot_sync(~0u, left > 0), here = __ballot_sync(~0u, left > 0 && (slot + block) % size == rank);
    if (there == 0) break;
    const int pair = slot << 16 | block << 8 | min(left, PAIR_RANKS);
    if (there >> lane & 1) list.pairs[0][count[0] + __popc(there & before)] = pair;
    if (here >> lane & 1) list.pairs[1][count[1] + __popc(here & before)] = pair;
    count[0] += __popc(there), count[1] += __popc(here);
  }
  if (lane == 0) list.count[0] = count[0], list.count[1] = count[1];
  __syncwarp();
}

// Sixteen rows of the weight and 16 ranks: [rows of eight h + 2 · ranks of eight k].
struct PairFragment {
  uint32_t b[4];
};

// How a stage of the ring carries pairs: 16 ranks × 64 rows of the weight are a box of 2 KiB, a rank a row, swizzled. Two
// boxes hold the rows of gate and of up, a rank of the one and of the other in turn; of 64 rows of a gated tile half of
// them go unused.
template <int BN, int KC, bool GATED>
struct PairStage {
  static constexpr int bytes = GATED ? 4096 : BN * 32, most = BN * 128 * KC / bytes;

  // One thread: the pairs of `list` from `at` on, for the tile of this number, and with the CTA's `first` ones s.
  __device__ static void load(uint32_t to, uint32_t full, const CUtensorMap& b_map, const AdapterArguments& a, int m,
                              PairList& list, int which, int at, int tile, bool first, uint64_t policy) {
    const int count = min(most, list.count[which] - at), s_bytes = m * a.pieces * a.row_ranks * 2;
    mbarrier_arrive_expect(full, count * bytes + (first ? s_bytes : 0));
    for (int i = 0; i < count; ++i, to += bytes) {
      const int pair = list.pairs[which][at + i];
      if constexpr (GATED) {
        tensor_load_4d(to, &b_map, tile * (BN / 2), 0, PairList::start(pair), PairList::slot(pair), full, policy);
      } else {
#pragma unroll
        for (int group = 0; group < BN / GROUP_ROWS; ++group) {
          tensor_load_4d(to + group * 2048, &b_map, tile * BN + group * GROUP_ROWS, 0, PairList::start(pair),
                         PairList::slot(pair), full, policy);
        }
      }
    }
    if (!first) return;
    a.wait_for_s();
    proxy_fence_async_global();
    bulk_load(shared_address(&list + 1), a.shrunk, s_bytes, full, policy_evict_last());
  }

  // A warp's 16 rows of a group × 16 ranks of one pair that lies at `from`, zero where there is no rank.
  __device__ static PairFragment fragment(uint32_t from, int group, int pair) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP_THREADS / 32;
    const int rank = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;  // of the matrix that this lane has a row of
    const int row = GATED ? rank * 2 + half : rank, eight = GATED ? group * 4 + warp : warp * 2 + half;
    PairFragment made;
    ldmatrix_x4_trans(made.b, from + (GATED ? 0 : group * 2048) + row * 128 + ((eight ^ row % 8) << 4));
    const int left = PairList::owned(pair) - lane % 4 * 2;
    if (PairList::owned(pair) < PAIR_RANKS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) made.b[i] &= left - i / 2 * 8 >= 2 ? ~0u : left - i / 2 * 8 == 1 ? 0xFFFFu : 0u;
    }
    return made;
  }
};

// What the consumers of a CTA know of the step's tokens: whose they are, and s in shared memory, [m][pieces][row_ranks].
template <int MT, bool GATED>
struct AdapterTokens {
  const AdapterArguments& a;
  uint32_t shared;
  uint32_t own[(MT + 31) / 32];  // the slot of token lane / 4 of each block, a byte each; 255: none

  __device__ AdapterTokens(const AdapterArguments& a_, int m, PairList* list) : a(a_), shared(shared_address(list + 1)) {
    if (!a.planned) grid_dependency_wait();
#pragma unroll
    for (int j = 0; j < MT / 8; ++j) {
      const int token = 8 * j + threadIdx.x % 32 / 4;
      const uint32_t slot = (token < m ? a.of_token[token] : -1) & 255;
      own[j / 4] = slot << j % 4 * 8 | (j % 4 ? own[j / 4] : 0);
    }
  }

  // s of 16 ranks of one piece, as fragments of each block.
  __device__ __forceinline__ void load(uint32_t (&s)[MT / 8][2], int piece, int start) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < MT / 8; j += 2) {
      const int token = 8 * (MT > 8 ? j + lane / 16 : 0) + lane % 8;
      uint32_t two[4];
      ldmatrix_x4(two, shared + ((token * a.pieces + piece) * a.row_ranks + start + lane / 8 % 2 * 8) * 2);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        if (j + v / 2 < MT / 8) s[j + v / 2][v % 2] = two[v];
      }
    }
  }

  // Adds what a stage carries, the pairs of `list` from `at` on, to the sums of a group's rows from `first` on. `columns`:
  // of the result.
  template <int BN, int KC>
  __device__ __forceinline__ void add(const PairList& list, int which, int at, uint32_t stage, int group, int first,
                                      int columns, float (&acc)[MT / 2]) const {
    using Pairs = PairStage<BN, KC, GATED>;
    const int warp = threadIdx.x % GROUP_THREADS / 32, count = min(Pairs::most, list.count[which] - at);
    int piece[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = GATED ? first / 2 + warp * 8 + h * columns : first + warp * 16 + 8 * h;
      piece[h] = (row >= a.ends[0]) + (row >= a.ends[1]);
    }
    const bool both = !GATED && piece[0] == piece[1];
#pragma unroll 1
    for (int h = 0; h < (both ? 1 : 2); ++h) {
      const uint32_t low = both || h == 0 ? ~0u : 0, high = both || h == 1 ? ~0u : 0;
      uint32_t s[MT / 8][2];
      int start = -1, next = list.pairs[which][at];
      PairFragment coming = Pairs::fragment(stage, group, next);
#pragma unroll 1
      for (int p = 0; p < count; ++p) {
        const int pair = next;
        PairFragment of = coming;
        if (start != PairList::start(pair)) load(s, h == 0 ? piece[0] : piece[1], start = PairList::start(pair));
        if (p + 1 < count) {  // on its way while this one is multiplied
          next = list.pairs[which][at + p + 1];
          coming = Pairs::fragment(stage + (p + 1) * Pairs::bytes, group, next);
        }
        of.b[0] &= low, of.b[1] &= high, of.b[2] &= low, of.b[3] &= high;
        uint32_t others[(MT + 31) / 32];  // a byte that is zero where the token is this slot's
#pragma unroll
        for (int i = 0; i < (MT + 31) / 32; ++i) others[i] = own[i] ^ PairList::slot(pair) * 0x01010101u;
#pragma unroll
        for (int j = 0; j < MT / 8; ++j) {
          float sums[4] = {acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]};
          const bool mine = (others[j / 4] & 255u << j % 4 * 8) == 0;
          mma_m16n8k16_bf16(sums, of.b, mine ? s[j][0] : 0, mine ? s[j][1] : 0);
#pragma unroll
          for (int v = 0; v < 4; ++v) acc[4 * j + v] = sums[v];
        }
      }
    }
  }
};

}  // namespace stoker
