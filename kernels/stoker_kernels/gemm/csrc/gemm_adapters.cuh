// What adapters add to a tile: B · s, where s = A · x was computed before (lora/csrc), each token with its own adapter's B.
//
// The tile's sums are fragments of mma.m16n8k16 with rows of the weight as M and tokens as N. So for each adapter of the
// step a warp multiplies its 16 rows of B with every block of tokens, and each token takes what its own adapter gave: a
// token's bits do not depend on who is beside it, nor does what an adapter holds reach another one's tokens.
#pragma once
#include "gemm_epilogue.cuh"

namespace stoker {

struct NoAdapters {
  static constexpr bool present = false;
};

struct AdapterArguments {
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

  // `first`: the group's first row, or its first column of a gated result of `columns`.
  template <bool GATED>
  __device__ static AdapterRows of(const AdapterArguments& a, int first, int columns) {
    const int warp = threadIdx.x % GROUP_THREADS / 32;
    AdapterRows r;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = GATED ? first + warp * 8 : first + warp * 16 + 8 * h;
      r.inside[h] = at < columns;
      r.row[h] = at + (GATED ? h * columns : 0);
      r.piece[h] = (r.row[h] >= a.ends[0]) + (r.row[h] >= a.ends[1]);
    }
    return r;
  }
};

// Brings a group's part of B to L2: of each adapter and rank `rows` rows from `row` on.
__device__ __forceinline__ void prefetch_adapters(const AdapterArguments& a, int row, int rows) {
  const int t = threadIdx.x % GROUP_THREADS;
  if (rows <= 0) return;
  for (int i = t / 16; i < a.tiles; i += GROUP_THREADS / 16) {
    const int slot = a.of_tile[i];
    if (slot < 0 || (i > 0 && a.of_tile[i - 1] == slot)) continue;
    const int owned = a.ranks[slot];
    for (int rank = t % 16; rank < owned; rank += 16) {
      prefetch_l2(a.b + slot * a.slot_stride + static_cast<int64_t>(rank) * a.rank_stride + row, 2 * rows);
    }
  }
}

// Adds to the sums of BLOCKS blocks of 8 tokens from block `from` on: to those with block % step == first.
template <int BLOCKS>
__device__ __forceinline__ void add_adapters(const AdapterArguments& a, const AdapterRows& rows, int m,
                                             float (&acc)[4 * BLOCKS], int from, int first, int step) {
  constexpr int AT_ONCE = BLOCKS < 8 ? 4 : 2;  // adapters whose loads are under way together, as far as registers go
  const int lane = threadIdx.x % 32, in_four = lane % 4, of_eight = lane / 4;
  uint32_t own[BLOCKS];  // the slots of a thread's two tokens of each block, 16 bits each
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const int token = 8 * (from + j) + 2 * in_four;
    const int low = token < m ? a.of_token[token] : -1, high = token + 1 < m ? a.of_token[token + 1] : -1;
    own[j] = (low & 0xFFFF) | high << 16;
  }
  const bool one_piece = rows.piece[0] == rows.piece[1];
  for (int tile = 0; tile < a.tiles; tile += 32) {
    const int at = tile + lane;
    const int slot = at < a.tiles ? a.of_tile[at] : -1;
    const bool again = slot >= 0 && at > 0 && a.of_tile[at - 1] == slot;
    const int owned = slot >= 0 && !again ? a.ranks[slot] : 0;
    for (int start = 0;; start += 16) {
      const unsigned with_ranks = __ballot_sync(~0u, owned > start);
      if (with_ranks == 0) break;
      for (int pass = 0; pass < (one_piece ? 1 : 2); ++pass) {
        uint32_t s[BLOCKS][2];
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
          const int token = 8 * (from + j) + of_eight;
          const __nv_bfloat16* at_token =
              a.shrunk + (static_cast<int64_t>(token) * a.pieces + (pass == 0 ? rows.piece[0] : rows.piece[1])) * a.row_ranks + start + 2 * in_four;
#pragma unroll
          for (int k = 0; k < 2; ++k) s[j][k] = token < m ? *reinterpret_cast<const uint32_t*>(at_token + 8 * k) : 0;
        }
        for (unsigned left = with_ranks; left != 0;) {
          int slots[AT_ONCE];
          uint32_t w[AT_ONCE][4];
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) {
            const int holder = left == 0 ? 0 : __ffs(left) - 1;
            slots[i] = left == 0 ? -2 : __shfl_sync(~0u, slot, holder);
            const int most = left == 0 ? 0 : __shfl_sync(~0u, owned, holder);
            left &= left - 1;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const int rank = start + 8 * k + of_eight;
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const bool wanted = rank < most && rows.inside[h] && (one_piece || h == pass);
                const __nv_bfloat16* from_b = a.b + slots[i] * a.slot_stride + static_cast<int64_t>(rank) * a.rank_stride;
                w[i][h + 2 * k] = wanted ? *reinterpret_cast<const uint32_t*>(from_b + rows.row[h] + 2 * in_four) : 0;
              }
            }
          }
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) {
            if (slots[i] == -2) break;
            uint32_t b[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) b[k] = transpose_matrix(w[i][k]);
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
              if ((from + j) % step != first) continue;
              float added[4] = {0.f, 0.f, 0.f, 0.f};
              mma_m16n8k16_bf16(added, b, s[j][0], s[j][1]);
#pragma unroll
              for (int v = 0; v < 4; ++v) {
                const int of_token = v % 2 ? own[j] >> 16 : own[j] & 0xFFFF;
                acc[4 * j + v] += of_token == slots[i] ? added[v] : 0.f;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace stoker
