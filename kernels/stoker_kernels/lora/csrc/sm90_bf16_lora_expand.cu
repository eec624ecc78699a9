// y += B · s for the tokens of a plan, or silu(gate) · up of that for all tokens, for sm_90a.
//
// A warp has 32 columns of a piece (with the activation 32 of gate and those of up) and a CTA some tiles of the plan, 16
// places of one slot each: tokens are mma's M side, columns its N side, ranks are summed over. Columns are dealt anew among
// the eights of mma, so that a lane's sums are eight neighbours of two tokens, as y is read and written, and a lane reads
// eight neighbours of B. Behind the plan's tiles come, for the activation, the tokens that no adapter has, by 16.
// Plan and B are read before the wait for the kernel that writes y, where the plan allows it.
#include "silu.cuh"

namespace stoker {

constexpr int EXPAND_TILE = 16, EXPAND_TILES = 4, EXPAND_COLUMNS = 32, EXPAND_WARPS = 4, EXPAND_RANKS = 16;

struct ExpandArguments {
  __nv_bfloat16* y;         // [m][columns], rows y_stride apart
  __nv_bfloat16* out;       // with the activation: [m][columns of a piece]
  const __nv_bfloat16* b;   // [slots][ranks][columns]
  const float* shrunk;      // [parts][tiles · 16][pieces][max_rank]
  const int* order;         // [tiles · 16]: tokens, or -1
  const int* of_tile;       // [tiles]: slots, or -1
  const int* ranks;         // by slot
  const int* of_token;      // [m]: slots, or -1
  int64_t slot_stride;      // of b, in elements, as the others
  int rank_stride, y_stride, out_stride, m, tiles, pieces, max_rank, parts, planned;
  int chunks;   // of EXPAND_WARPS · EXPAND_COLUMNS columns
  int rows[4];  // columns of each piece
};

// Where a warp's columns are.
struct ExpandColumns {
  int piece = 0, begin = 0, first, end;  // the piece's first column, and within it the warp's and its end

  __device__ ExpandColumns(const ExpandArguments& g, int block, bool one_piece) {
    for (; !one_piece && piece < g.pieces; ++piece) {
      const int blocks = (g.rows[piece] + EXPAND_COLUMNS - 1) / EXPAND_COLUMNS;
      if (block < blocks) break;
      block -= blocks, begin += g.rows[piece];
    }
    first = block * EXPAND_COLUMNS, end = piece < g.pieces ? g.rows[piece] : 0;
  }
};

// B of 16 ranks from `rank` on and the warp's columns, four eights of mma's N side; zeros beyond what the slot has.
__device__ __forceinline__ void load_expanding(uint32_t (&b)[4][2], const ExpandArguments& g, const __nv_bfloat16* columns,
                                               int rank, int owned, bool there) {
  const int of_eight = threadIdx.x % 32 / 4, in_four = threadIdx.x % 4;
  uint4 lines[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = rank + 2 * in_four + i % 2 + i / 2 * 8;
    lines[i] = there && line < owned
                   ? *reinterpret_cast<const uint4*>(columns + static_cast<int64_t>(line) * g.rank_stride)
                   : uint4{0, 0, 0, 0};
  }
  const uint32_t half = of_eight % 2 ? 0x7632 : 0x5410;  // of each word, whose column is this lane's
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 &low = lines[2 * h], &high = lines[2 * h + 1];
    b[0][h] = __byte_perm(low.x, high.x, half);
    b[1][h] = __byte_perm(low.y, high.y, half);
    b[2][h] = __byte_perm(low.z, high.z, half);
    b[3][h] = __byte_perm(low.w, high.w, half);
  }
}

// s of a tile's tokens and 16 ranks from `rank` on, rounded to bf16 once; zeros beyond what the slot has.
__device__ __forceinline__ void load_shrunk(uint32_t (&a)[4], const ExpandArguments& g, int tile, int piece, int rank,
                                            int owned) {
  const int of_eight = threadIdx.x % 32 / 4, in_four = threadIdx.x % 4;
  const int64_t part = static_cast<int64_t>(g.tiles) * EXPAND_TILE * g.pieces * g.max_rank;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int place = tile * EXPAND_TILE + of_eight + i % 2 * 8, at = rank + 2 * in_four + i / 2 * 8;
    const float* from = g.shrunk + (static_cast<int64_t>(place) * g.pieces + piece) * g.max_rank + at;
    float2 sum = {0.f, 0.f};
    if (at < owned) {
      sum = *reinterpret_cast<const float2*>(from);
#pragma unroll 1
      for (int more = 1; more < g.parts; ++more) {
        const float2 next = *reinterpret_cast<const float2*>(from + more * part);
        sum.x += next.x, sum.y += next.y;
      }
    }
    a[i] = pack_bf16(sum.x, at + 1 < owned ? sum.y : 0.f);
  }
}

// v[h] + the sums of token h, as fp32.
__device__ __forceinline__ void add_sums(float (&value)[8], const uint4& v, const float (&sums)[4][4], int h) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    value[2 * j] = __uint_as_float(words[j] << 16) + sums[j][2 * h];
    value[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000u) + sums[j][2 * h + 1];
  }
}

template <bool GATED>
__device__ __forceinline__ void lora_expand(const ExpandArguments& g) {
  constexpr int SIDES = GATED ? 2 : 1;
  launch_dependents();
  if (!g.planned) grid_dependency_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, of_eight = lane / 4, in_four = lane % 4;
  const ExpandColumns mine(g, blockIdx.x % g.chunks * EXPAND_WARPS + warp, GATED);
  const int first_tile = blockIdx.x / g.chunks * EXPAND_TILES, column = mine.first + in_four * 8;
  const int read_column = mine.first + of_eight / 2 * 8;
  const bool stores = column < mine.end, reads = read_column < mine.end;
  uint32_t b[SIDES][4][2];
  int held = -1, owned = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < first_tile + EXPAND_TILES && mine.first < mine.end; ++tile) {
    int tokens[2], slot = -1;
    if (tile < g.tiles) {
      slot = g.of_tile[tile];
      if (slot < 0) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) tokens[h] = g.order[tile * EXPAND_TILE + of_eight + 8 * h];
    } else {
      if (!GATED) break;
      bool any = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = (tile - g.tiles) * EXPAND_TILE + of_eight + 8 * h;
        tokens[h] = token < g.m && g.of_token[token] < 0 ? token : -1;
        any |= tokens[h] >= 0;
      }
      if (!__any_sync(~0u, any)) continue;
    }
    const __nv_bfloat16* lines = g.b + static_cast<int64_t>(max(slot, 0)) * g.slot_stride + mine.begin + read_column;
    if (slot != held) {
      held = slot, owned = slot < 0 ? 0 : g.ranks[slot];
#pragma unroll
      for (int s = 0; s < SIDES; ++s) load_expanding(b[s], g, lines + s * g.rows[0], 0, owned, reads);
    }
    if (!GATED && owned == 0) continue;
    grid_dependency_wait();
    uint4 v[2][SIDES];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int s = 0; s < SIDES; ++s) {
        const __nv_bfloat16* from = g.y + static_cast<int64_t>(max(tokens[h], 0)) * g.y_stride + mine.begin + column;
        v[h][s] = tokens[h] >= 0 && stores ? *reinterpret_cast<const uint4*>(from + s * g.rows[0]) : uint4{0, 0, 0, 0};
      }
    }
    float sums[SIDES][4][4] = {};
#pragma unroll 1
    for (int rank = 0; rank < owned; rank += EXPAND_RANKS) {
#pragma unroll
      for (int s = 0; s < SIDES; ++s) {
        uint32_t a[4];
        load_shrunk(a, g, tile, mine.piece + s, rank, owned);
        if (rank > 0) load_expanding(b[s], g, lines + s * g.rows[0], rank, owned, reads);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(sums[s][j], a, b[s][j]);
      }
    }
    if (owned > EXPAND_RANKS) held = -2;  // of other ranks
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (tokens[h] < 0 || !stores) continue;
      float value[SIDES][8];
#pragma unroll
      for (int s = 0; s < SIDES; ++s) add_sums(value[s], v[h][s], sums[s], h);
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = GATED ? silu_times(value[0] + 2 * j, value[SIDES - 1] + 2 * j)
                         : pack_bf16(value[0][2 * j], value[0][2 * j + 1]);
      __nv_bfloat16* to = GATED ? g.out + static_cast<int64_t>(tokens[h]) * g.out_stride
                                : g.y + static_cast<int64_t>(tokens[h]) * g.y_stride + mine.begin;
      *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  grid_dependency_wait();  // who waits for this grid waits for those before it, too
}

}  // namespace stoker

extern "C" __global__ void __launch_bounds__(128, 5)
    sm90_bf16_lora_expand_plain(const __grid_constant__ stoker::ExpandArguments g) {
  stoker::lora_expand<false>(g);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    sm90_bf16_lora_expand_gated(const __grid_constant__ stoker::ExpandArguments g) {
  stoker::lora_expand<true>(g);
}
