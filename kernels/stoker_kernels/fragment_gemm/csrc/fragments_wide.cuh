// y = x · Wᵀ for weights in fragments and more tokens than a few, by wgmma with the weight from registers.
//
// A CTA has ROWS weight rows, strips of 64, and TOKENS tokens: GROUPS warpgroups multiply, the first FULL of them STRIPS
// strips and the others one less. Another warpgroup streams x by TMA, codes, scales and zero points by bulk copies into a
// ring of k blocks of 64 columns; weights are on their way before the wait for the previous kernel. Half a
// block of a strip at a time is turned into bf16 registers while the tensor cores work on the half before.
//
// CTAs take tiles in turn; with a split a cluster shares the columns of one tile instead, and sums over its CTAs in order.
#pragma once
#include <cuda.h>

#include "fragments.cuh"
#include "wgmma.cuh"

namespace stoker {

// The upper half of wgmma_descriptor: a step along K changes the lower one alone.
constexpr uint64_t DESCRIPTOR_TOP = (1ull << 62) | (64ull << 32);

template <class N_, int TOKENS_, int GROUPS_, int STRIPS_, int FULL_, int STAGES_, int REGISTERS_, int REST_>
struct Wide {
  using N = N_;
  static constexpr int TOKENS = TOKENS_, GROUPS = GROUPS_, STRIPS = STRIPS_, FULL = FULL_, STAGES = STAGES_;
  static constexpr int REGISTERS = REGISTERS_, REST = REST_;  // of a thread that multiplies STRIPS, and one less
  static constexpr int ALL_STRIPS = STRIPS * FULL + (STRIPS - 1) * (GROUPS - FULL), ROWS = ALL_STRIPS * BLOCK_ROWS;
  static constexpr int SETS = N::SETS, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
  static constexpr int X_BYTES = TOKENS * 128, PIECE_BYTES = TILES * 32 * 16, STRIP_BYTES = N::PIECES * PIECE_BYTES;
  static constexpr int CODE_BYTES = ALL_STRIPS * STRIP_BYTES;
  static constexpr int SCALE_BYTES = SETS * ROWS * N::SCALE_BYTES, ZERO_BYTES = SETS * ROWS * N::ZERO_BYTES;
  static constexpr int CODES_AT = X_BYTES, SCALE_AT = CODES_AT + CODE_BYTES, ZERO_AT = SCALE_AT + SCALE_BYTES;  // of a stage
  static constexpr int STAGE_BYTES = (ZERO_AT + ZERO_BYTES + 1023) / 1024 * 1024;
  static constexpr int SUM_BYTES = ROWS * TOKENS * 4, RING_BYTES = STAGES * STAGE_BYTES;
  static constexpr int LOW_BYTES = RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES;  // the sums lie where the ring was
  static constexpr int STAGING_BYTES = TOKENS * BLOCK_ROWS * 2;
};

// [stages of x, codes, scales, zeros]; then each group's staging, then barriers. `tiles.py` reserves as much.
template <class C>
struct WideRing {
  uint32_t base, full, empty;
  unsigned char* pointer;

  __device__ explicit WideRing(unsigned char* raw) {
    const uint32_t start = shared_address(raw);
    base = (start + 1023) & ~1023u;
    pointer = raw + (base - start);
    full = base + C::LOW_BYTES + C::GROUPS * C::STAGING_BYTES;
    empty = full + 8 * C::STAGES;
  }
  __device__ uint32_t at(int stage) const { return base + stage * C::STAGE_BYTES; }
  __device__ unsigned char* staging(int group) const { return pointer + C::LOW_BYTES + group * C::STAGING_BYTES; }
};

// The tiles of a CTA, and the blocks of columns of each that are its own.
template <class C>
struct WideWork {
  int token_tiles, tiles, rank, first, step, begin, end;

  __device__ explicit WideWork(const FragmentArguments& p) {
    token_tiles = (p.m + C::TOKENS - 1) / C::TOKENS;
    tiles = (p.n + C::ROWS - 1) / C::ROWS * token_tiles;
    rank = blockIdx.x % p.split, first = blockIdx.x / p.split, step = gridDim.x / p.split;
    const int blocks = p.k / BLOCK_COLUMNS;
    begin = blocks * rank / p.split, end = blocks * (rank + 1) / p.split;
  }
  __device__ int row(int tile) const { return tile / token_tiles * C::ROWS; }
  __device__ int token(int tile) const { return tile % token_tiles * C::TOKENS; }
};

// The producers are four warps of one thread each, since a copy takes a thread a hundred cycles: one brings x, and says how
// many bytes a stage has, the others strips in turn, the last one scales and zero points too. Only x waits for the kernel
// before.
constexpr int CODE_WARPS = 3;

template <class C>
__device__ __forceinline__ void produce_x(const CUtensorMap& x_map, const FragmentArguments& p, const WideRing<C>& ring,
                                          const WideWork<C>& work) {
  const uint64_t keep = policy_evict_last();
  int stage = 0;
  uint32_t parity = 1;  // of the release that allows a stage's next use
  grid_dependency_wait();
  proxy_fence_async_global();
  for (int tile = work.first; tile < work.tiles; tile += work.step) {
    const int rows = min(C::ROWS, p.n - work.row(tile)), token = work.token(tile);
    const int each = C::N::SCALE_BYTES + (p.zero == nullptr ? 0 : C::N::ZERO_BYTES);
    const int bytes = C::X_BYTES + rows / BLOCK_ROWS * C::STRIP_BYTES + C::SETS * rows * each;
    for (int block = work.begin; block < work.end; block++) {
      mbarrier_wait(ring.empty + 8 * stage, parity);
      mbarrier_arrive_expect(ring.full + 8 * stage, bytes);
      tensor_load_2d(ring.at(stage), &x_map, block * BLOCK_COLUMNS, token, ring.full + 8 * stage, keep);
      if (++stage == C::STAGES) stage = 0, parity ^= 1;
    }
  }
}

template <class C>
__device__ __forceinline__ void produce_weights(const FragmentArguments& p, const WideRing<C>& ring,
                                                const WideWork<C>& work, int strip) {
  static_assert(C::ALL_STRIPS <= 2 * CODE_WARPS);
  const uint64_t once = policy_evict_first(), keep = policy_evict_last();
  const int64_t strip_bytes = static_cast<int64_t>(p.k / BLOCK_COLUMNS) * C::STRIP_BYTES;  // of a whole row of blocks
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = work.first; tile < work.tiles; tile += work.step) {
    const int row = work.row(tile), rows = min(C::ROWS, p.n - row);
    const unsigned char* codes = reinterpret_cast<const unsigned char*>(p.codes) + (row / BLOCK_ROWS + strip) * strip_bytes +
                                 work.begin * C::STRIP_BYTES;
    const bool one = strip * BLOCK_ROWS < rows, two = (strip + CODE_WARPS) * BLOCK_ROWS < rows;
#pragma unroll 1
    for (int block = work.begin; block < work.end; block++) {
      mbarrier_wait(ring.empty + 8 * stage, parity);
      const uint32_t to = ring.at(stage), full = ring.full + 8 * stage;
      if (one) bulk_load(to + C::CODES_AT + strip * C::STRIP_BYTES, codes, C::STRIP_BYTES, full, once);
      if (two)
        bulk_load(to + C::CODES_AT + (strip + CODE_WARPS) * C::STRIP_BYTES, codes + CODE_WARPS * strip_bytes,
                  C::STRIP_BYTES, full, once);
      if (strip == CODE_WARPS - 1) {
#pragma unroll 1
        for (int g = 0; g < C::SETS; g++) {
          constexpr int EACH = C::N::SCALE_BYTES;
          const int64_t place = group_at(p, block * STEPS + step_of_set<typename C::N>(g)) + row;
          bulk_load(to + C::SCALE_AT + g * C::ROWS * EACH, p.scale + place * EACH, rows * EACH, full, keep);
          if (C::N::ZERO_BYTES > 0 && p.zero != nullptr)
            bulk_load(to + C::ZERO_AT + g * C::ROWS, p.zero + place, rows, full, keep);
        }
      }
      codes += C::STRIP_BYTES;
      if (++stage == C::STAGES) stage = 0, parity ^= 1;
    }
  }
}

// A thread's part of a strip's block: its codes, and the scales of its two rows in each group.
template <class C>
struct StripBlock {
  using N = typename C::N;
  uint4 codes[N::PIECES];
  uint32_t scale[C::SETS], zero[C::SETS];

  // `stage`, and the thread's places within its parts for codes, scales and zero points.
  __device__ __forceinline__ StripBlock(const unsigned char* stage, int code, int row) {
#pragma unroll
    for (int piece = 0; piece < N::PIECES; piece++)
      codes[piece] = *reinterpret_cast<const uint4*>(stage + C::CODES_AT + piece * C::PIECE_BYTES + code);
#pragma unroll
    for (int g = 0; g < C::SETS; g++) {
      const unsigned char* scales = stage + C::SCALE_AT + (g * C::ROWS + row) * N::SCALE_BYTES;
      if constexpr (N::SCALE_BYTES == 2) {
        scale[g] = *reinterpret_cast<const uint32_t*>(scales);
      } else {
        scale[g] = *reinterpret_cast<const uint16_t*>(scales);
      }
      zero[g] = 0;
      if constexpr (N::ZERO_BYTES > 0) zero[g] = *reinterpret_cast<const uint16_t*>(stage + C::ZERO_AT + g * C::ROWS + row);
    }
  }
  // Step `s` in bf16.
  __device__ __forceinline__ void unpack_step(int s, uint32_t (&a)[4]) const {
    constexpr int PIECE_STEPS = STEPS / N::PIECES;
    const int g = s * C::SETS / STEPS;
    N::unpack(codes[s / PIECE_STEPS], s % PIECE_STEPS, typename N::Scales(scale[g], zero[g]), a);
  }
};

// A thread's sums of two rows and two tokens each, whole.
template <class C>
__device__ __forceinline__ void bring_to_unit(float (&v)[4], float2 unit) {
  if constexpr (C::N::FACTORS || C::N::UNIT != 1.f) v[0] *= unit.x, v[1] *= unit.x, v[2] *= unit.y, v[3] *= unit.y;
}

template <class C>
__device__ __forceinline__ float2 units_of(const FragmentArguments& p, int row) {
  return make_float2(unit_of<typename C::N>(p, row), unit_of<typename C::N>(p, row + 1));
}

// All blocks of one tile into `sums`; stages are given back to the producer.
template <class C, int STRIPS>
__device__ __forceinline__ void multiply_tile(const WideRing<C>& ring, const WideWork<C>& work, int first_strip,
                                              int& stage, uint32_t& parity, float (&sums)[STRIPS][C::TOKENS / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int code = first_strip * C::STRIP_BYTES + threadIdx.x % 128 * 16, row = first_strip * BLOCK_ROWS + lane / 4 * 8 + warp * 2;
  uint32_t a[2][2][4];
  int held = -1;
  for (int block = work.begin; block < work.end; block++) {
    mbarrier_wait(ring.full + 8 * stage, parity);
    const unsigned char* here = ring.pointer + stage * C::STAGE_BYTES;
    const uint32_t x = static_cast<uint32_t>(wgmma_descriptor(ring.at(stage)));
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
      const StripBlock<C> mine(here, code + s * C::STRIP_BYTES, row + s * BLOCK_ROWS);
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 2; i++) mine.unpack_step(2 * half + i, a[half][i]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; i++)
          WgmmaRegisters<__nv_bfloat16, C::TOKENS, false>::multiply(
              sums[s], a[half][i], DESCRIPTOR_TOP | (x + (2 * half + i) * 2), block != work.begin || half + i != 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (s == 0 && half == 0 && held >= 0 && lane == 0) mbarrier_arrive(ring.empty + 8 * held);
      }
    }
    held = stage;
    if (++stage == C::STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int s = 0; s < STRIPS; s++) wgmma_results(sums[s]);
  if (lane == 0 && held >= 0) mbarrier_arrive(ring.empty + 8 * held);
}

// Words that a staged 16 bytes of the tokens 2c and 2c + 1 of an eight are turned by.
template <int MODE>
__device__ __forceinline__ int turn_of(int c) { return MODE == GATED ? c / 2 : c; }

// Eight tokens of a strip, of which a thread has two of two rows, to a group's staging: [token][64 rows] in bf16. What a
// thread's four warps have of 16 bytes turns with the token, so that a warp's stores meet no bank twice (PAIRED:
// twice). PAIRED: the even rows, then the odd ones; GATED: 32 columns, in the upper half for every other two tokens.
template <int MODE>
__device__ __forceinline__ void stage_eight(unsigned char* staging, int eight, const float (&v)[4], float2 bias) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, c = lane % 4, column = lane / 4 * 4 + warp;
  unsigned char* to = staging + (eight * 8 + 2 * c) * (BLOCK_ROWS * 2);
  if (MODE == PLAIN) {
    to += lane / 4 * 16 + (warp + c) % 4 * 4;
    *reinterpret_cast<uint32_t*>(to) = pack_bf16(v[0] + bias.x, v[2] + bias.y);
    *reinterpret_cast<uint32_t*>(to + BLOCK_ROWS * 2) = pack_bf16(v[1] + bias.x, v[3] + bias.y);
    return;
  }
  to += column / 8 * 16 + (column % 8 / 2 + turn_of<MODE>(c)) % 4 * 4 + column % 2 * 2 + (MODE == GATED ? c % 2 * 64 : 0);
#pragma unroll
  for (int h = 0; h < (MODE == GATED ? 1 : 2); h++) {
    const float b = h ? bias.y : bias.x;
    const uint32_t tokens = MODE == GATED ? silu_times(v, v + 2) : pack_bf16(v[2 * h] + b, v[2 * h + 1] + b);
    *reinterpret_cast<uint16_t*>(to + 64 * h) = static_cast<uint16_t>(tokens);
    *reinterpret_cast<uint16_t*>(to + 64 * h + BLOCK_ROWS * 2) = static_cast<uint16_t>(tokens >> 16);
  }
}

// Staged tokens whose eight is `rank`, modulo `split`, to the result: 16 bytes a thread.
template <int MODE, int TOKENS>
__device__ __forceinline__ void store_staged(const FragmentArguments& p, const unsigned char* staging, int row, int token0,
                                             int rank) {
  const int t = threadIdx.x % 128, c = t / 8 / 2 % 4, turn = turn_of<MODE>(c);
  int column = row + t % 8 * 8;
  if (MODE != PLAIN) column = row / 2 + t % 4 * 8 + (MODE == PAIRED && t % 8 > 3 ? p.n / 2 : 0);
  if (MODE == GATED && t % 8 / 4 != c % 2) return;
#pragma unroll 4
  for (int at = t / 8; at < TOKENS; at += 16) {
    if (token0 + at >= p.m || row >= p.n || at / 8 % p.split != rank) continue;
    const uint4 v = *reinterpret_cast<const uint4*>(staging + at * (BLOCK_ROWS * 2) + t % 8 * 16);
    // Word w lies at (w + turn) % 4.
    const uint4 one = turn & 1 ? make_uint4(v.y, v.z, v.w, v.x) : v;
    const uint4 two = turn & 2 ? make_uint4(one.z, one.w, one.x, one.y) : one;
    *reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(token0 + at) * p.ld_out + column) = two;
  }
}

template <class C, int STRIPS, int MODE>
__device__ __forceinline__ void store_tile(const FragmentArguments& p, const WideRing<C>& ring, const WideWork<C>& work,
                                           int tile, int first_strip, const float (&sums)[STRIPS][C::TOKENS / 2]) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  unsigned char* staging = ring.staging(group);
#pragma unroll
  for (int s = 0; s < STRIPS; s++) {
    const int row = work.row(tile) + (first_strip + s) * BLOCK_ROWS;
    const float2 bias = bias_of(p, row + lane / 4 * 8 + warp * 2);
    const float2 unit = units_of<C>(p, row + lane / 4 * 8 + warp * 2);
    named_barrier(1 + group, 128);
#pragma unroll
    for (int j = 0; j < C::TOKENS / 8; j++) {
      float v[4] = {sums[s][4 * j], sums[s][4 * j + 1], sums[s][4 * j + 2], sums[s][4 * j + 3]};
      bring_to_unit<C>(v, unit);
      stage_eight<MODE>(staging, j, v, bias);
    }
    named_barrier(1 + group, 128);
    store_staged<MODE, C::TOKENS>(p, staging, row, work.token(tile), 0);
  }
}

// The cluster's CTAs each sum and store a share of the eights of tokens, from all CTAs in order.
template <class C, int STRIPS, int MODE>
__device__ __forceinline__ void sum_tile(const FragmentArguments& p, const WideRing<C>& ring, const WideWork<C>& work,
                                         int tile, int first_strip, const float (&sums)[STRIPS][C::TOKENS / 2]) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  constexpr int EIGHTS = C::TOKENS / 8;
  float4* parts = reinterpret_cast<float4*>(ring.pointer) + threadIdx.x % 128;
  named_barrier(6, C::CONSUMERS);  // everyone has read the ring
#pragma unroll
  for (int s = 0; s < STRIPS; s++)
#pragma unroll
    for (int j = 0; j < EIGHTS; j++)
      parts[((first_strip + s) * EIGHTS + j) * 128] =
          make_float4(sums[s][4 * j], sums[s][4 * j + 1], sums[s][4 * j + 2], sums[s][4 * j + 3]);
  cluster_sync();
#pragma unroll 1
  for (int s = 0; s < STRIPS; s++) {
    const int row = work.row(tile) + (first_strip + s) * BLOCK_ROWS;
    const float2 bias = bias_of(p, row + lane / 4 * 8 + warp * 2);
    const float2 unit = units_of<C>(p, row + lane / 4 * 8 + warp * 2);
    named_barrier(1 + group, 128);
#pragma unroll 1
    for (int j = work.rank; j < EIGHTS; j += p.split) {
      const float4* from = parts + ((first_strip + s) * EIGHTS + j) * 128;
      float4 part[8];
#pragma unroll
      for (int peer = 0; peer < 8; peer++)
        part[peer] = peer < p.split ? read_peer(from, peer) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int peer = 1; peer < 8; peer++) add(part[0], part[peer]);
      float v[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
      bring_to_unit<C>(v, unit);
      stage_eight<MODE>(ring.staging(group), j, v, bias);
    }
    named_barrier(1 + group, 128);
    store_staged<MODE, C::TOKENS>(p, ring.staging(group), row, work.token(tile), work.rank);
  }
  cluster_sync();  // nobody leaves while its sums are read
}

template <class C, int STRIPS, int MODE>
__device__ __forceinline__ void finish(const FragmentArguments& p, const WideRing<C>& ring, const WideWork<C>& work, int tile,
                                       int first_strip, const float (&sums)[STRIPS][C::TOKENS / 2]) {
  if (p.split > 1) return sum_tile<C, STRIPS, MODE>(p, ring, work, tile, first_strip, sums);
  store_tile<C, STRIPS, MODE>(p, ring, work, tile, first_strip, sums);
}

template <class C, int STRIPS>
__device__ __forceinline__ void consume(const FragmentArguments& p, const WideRing<C>& ring, const WideWork<C>& work,
                                        int first_strip) {
  float sums[STRIPS][C::TOKENS / 2];
  int stage = 0;
  uint32_t parity = 0;
  grid_dependency_wait();
  for (int tile = work.first; tile < work.tiles; tile += work.step) {
    multiply_tile<C, STRIPS>(ring, work, first_strip, stage, parity, sums);
    switch (p.rows) {
      case GATED: finish<C, STRIPS, GATED>(p, ring, work, tile, first_strip, sums); break;
      case PAIRED: finish<C, STRIPS, PAIRED>(p, ring, work, tile, first_strip, sums); break;
      default: finish<C, STRIPS, PLAIN>(p, ring, work, tile, first_strip, sums);
    }
    if (p.split > 1) return;  // a cluster has one tile
  }
}

template <class C>
__device__ __forceinline__ void fragments_wide(const CUtensorMap& x_map, const FragmentArguments& p) {
  extern __shared__ unsigned char raw[];
  const WideRing<C> ring(raw);
  const WideWork<C> work(p);
  const int group = threadIdx.x / 128;
  if (threadIdx.x == C::CONSUMERS) {
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < C::STAGES; s++) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, C::CONSUMERS / 32);
    }
    mbarrier_init_fence();
  }
  if constexpr (C::ZERO_BYTES > 0) {
    if (p.zero == nullptr) {  // no copy comes to their places
      for (int at = threadIdx.x; at < C::STAGES * C::ZERO_BYTES / 4; at += C::THREADS)
        *reinterpret_cast<uint32_t*>(ring.pointer + at / (C::ZERO_BYTES / 4) * C::STAGE_BYTES + C::ZERO_AT +
                                     at % (C::ZERO_BYTES / 4) * 4) = C::N::MIDDLE;
    }
  }
  __syncthreads();
  launch_dependents();
  if (group == C::GROUPS) {
    registers_shrink<40>();
    const int warp = threadIdx.x % 128 / 32;
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) {
        produce_x<C>(x_map, p, ring, work);
      } else {
        produce_weights<C>(p, ring, work, warp - 1);
      }
    }
    __syncwarp();
    if (p.split > 1) {
      cluster_sync();
      cluster_sync();
    }
    return;
  }
  if constexpr (C::FULL < C::GROUPS) {
    if (group >= C::FULL) {
      registers_grow<C::REST>();
      return consume<C, C::STRIPS - 1>(p, ring, work, C::FULL * C::STRIPS + (group - C::FULL) * (C::STRIPS - 1));
    }
  }
  registers_grow<C::REGISTERS>();
  consume<C, C::STRIPS>(p, ring, work, group * C::STRIPS);
}

}  // namespace stoker
