// What adapters add to a tile: B · s, where s = A · x was computed before (lora/csrc), each token with its own adapter's B.
//
// For one block of 8 tokens. The tile's sums are fragments of mma.m16n8k16 with rows of the weight as M and tokens as N. So
// a warp multiplies its 16 rows of each adapter's B with the block, where s is zero for the tokens of others: their sums
// stay as they are, bit for bit, and a token's bits do not depend on who is beside it. B is finite, or 0 · B would be none.
#pragma once
#include "gemm_epilogue.cuh"

namespace stoker {

struct AdapterPairs;
struct AdapterTile;

struct NoAdapters {
  struct Nothing {
    template <typename... Any>
    __device__ explicit Nothing(const Any&...) {}
  };
  using Pairs = Nothing;
  using Tile = Nothing;
  static constexpr bool present = false, planned = true;
};

struct AdapterArguments {
  using Pairs = AdapterPairs;
  using Tile = AdapterTile;
  static constexpr bool present = true;
  const __nv_bfloat16* b;       // [slots][ranks][rows of the weight]; beyond a slot's own ranks it holds anything
  const __nv_bfloat16* shrunk;  // s, [m][pieces][row_ranks]; where a slot has no rank it holds anything
  const int* of_token;          // [m]: the slot of each token, or -1
  const int* of_tile;           // [tiles]: slots in their order, then -1; one may stand several times
  const int* ranks;             // by slot
  int64_t slot_stride;          // of b, in elements
  int rank_stride, row_ranks, pieces, tiles;
  int ends[2];  // the first rows of the second and the third piece
  int planned;  // of_token, of_tile and ranks may be read before the kernel before has ended
};

// A group's rows of the weight by eights, as a warp's fragments hold them: two of each warp, and the piece of each.
struct AdapterRows {
  int row[2], piece[2];
  bool inside[2];

  // `first`: the group's first row of a tile; gated, of two halves of `columns` by eights in turn.
  __device__ AdapterRows(const AdapterArguments& a, int first, int columns, bool gated) {
    const int warp = threadIdx.x % GROUP_THREADS / 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = gated ? first / 2 + warp * 8 : first + warp * 16 + 8 * h;
      inside[h] = at < columns;
      row[h] = at + (gated ? h * columns : 0);
      piece[h] = (row[h] >= a.ends[0]) + (row[h] >= a.ends[1]);
    }
  }
};

// An adapter and 16 of its ranks: pair i of a step is in lane i of each warp, those of the first ranks first.
struct AdapterPairs {
  static constexpr int MOST = 8;
  int slot = 0, start = 0, owned = 0, count = 0;  // count: of all lanes' pairs, at most MOST

  __device__ explicit AdapterPairs(const AdapterArguments& a) {
    const int lane = threadIdx.x % 32;  // a step of up to 8 tokens has up to 8 tiles
    const int slot_here = lane < a.tiles ? a.of_tile[lane] : -1;
    const bool again = lane > 0 && slot_here >= 0 && a.of_tile[lane - 1] == slot_here;
    const int owned_here = slot_here >= 0 && !again ? a.ranks[slot_here] : 0;
    for (int from = 0, before = -1; count != before; from += 16) {
      before = count;
      for (unsigned left = __ballot_sync(~0u, owned_here > from); left != 0; left &= left - 1) {
        const int holder = __ffs(left) - 1;
        const int slot_there = __shfl_sync(~0u, slot_here, holder), owned_there = __shfl_sync(~0u, owned_here, holder);
        if (lane == count) slot = slot_there, start = from, owned = owned_there;
        ++count;
      }
    }
  }
};

// What a warp holds of B for one tile: a fragment for each pair, whose loads run beside the tile's main loop.
struct AdapterTile {
  AdapterRows rows;
  uint32_t held[AdapterPairs::MOST][4];

  __device__ AdapterTile(const AdapterArguments& a, const AdapterPairs& pairs, int first, int columns, bool gated)
      : rows(a, first, columns, gated) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < AdapterPairs::MOST; ++i) {
      if (i >= pairs.count) break;
      const int64_t slot = __shfl_sync(~0u, pairs.slot, i);
      const int start = __shfl_sync(~0u, pairs.start, i), owned = __shfl_sync(~0u, pairs.owned, i);
      // Fragment h + 2k: eight rows h, ranks 8k to 8k + 7, a rank a row until it is transposed.
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int rank = start + 8 * k + lane / 4;
        const __nv_bfloat16* of_rank = a.b + slot * a.slot_stride + static_cast<int64_t>(rank) * a.rank_stride;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool there = rank < owned && rows.inside[h];
          held[i][h + 2 * k] = there ? *reinterpret_cast<const uint32_t*>(of_rank + rows.row[h] + 2 * (lane % 4)) : 0;
        }
      }
    }
  }

  // Adds to the sums of the step's block of tokens.
  __device__ __forceinline__ void add(const AdapterArguments& a, const AdapterPairs& pairs, int m, float (&sums)[4]) const {
    const int lane = threadIdx.x % 32, token = lane / 4;
    const bool there = token < m, one_piece = rows.piece[0] == rows.piece[1];
    const int own = there ? a.of_token[token] : -1;
    int ready = -1;  // the rank from which on s is there
    uint32_t s[2][2];
#pragma unroll
    for (int i = 0; i < AdapterPairs::MOST; ++i) {
      if (i >= pairs.count) break;
      const int slot = __shfl_sync(~0u, pairs.slot, i), start = __shfl_sync(~0u, pairs.start, i);
      if (start != ready) {
        ready = start;
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
          if (pass == 1 && one_piece) break;
          const __nv_bfloat16* at = a.shrunk + (token * a.pieces + rows.piece[pass]) * a.row_ranks + start + 2 * (lane % 4);
#pragma unroll
          for (int k = 0; k < 2; ++k) s[pass][k] = there ? *reinterpret_cast<const uint32_t*>(at + 8 * k) : 0;
        }
      }
      uint32_t b[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) b[k] = transpose_matrix(held[i][k]);
      const uint32_t low[4] = {b[0], one_piece ? b[1] : 0, b[2], one_piece ? b[3] : 0}, high[4] = {0, b[1], 0, b[3]};
      const bool mine = own == slot;
      mma_m16n8k16_bf16(sums, low, mine ? s[0][0] : 0, mine ? s[0][1] : 0);
      if (!one_piece) mma_m16n8k16_bf16(sums, high, mine ? s[1][0] : 0, mine ? s[1][1] : 0);
    }
  }
};

}  // namespace stoker
