// What products of many tokens with GGUF's planes are given, and the rings that carry planes and x to shared memory.
//
// A CTA's rows are two spans of ROWS / 2: neighbours, or as many of gate and of up. Codes, scales and factors come a half
// step at a time, 128 columns, codes by TMA in the swizzle of their line: rows of 64 or 32 bytes. x comes in boxes of 64
// columns. Only x waits for the kernel before.
#pragma once
#include <cuda.h>

#include "plane_numbers.cuh"

namespace stoker {

constexpr int HALF_COLUMNS = 128, X_COLUMNS = 64, STRIP_ROWS = 64;
constexpr int WIDE_SHARED = 227 * 1024, WIDE_STAGES = 4;

struct PlaneMaps {
  CUtensorMap low[2], high[2];  // of both spans: boxes of ROWS / 2 rows × a half step, or of a step where it has 32 bytes
};

struct WideBlockArguments {
  __nv_bfloat16* out;         // [m, count], rows ld_out apart
  const __nv_bfloat16* bias;  // [count] or null, which it is where gated
  const unsigned char* scale[2];   // of both spans: [steps, words of 8 bytes, n]
  const unsigned char* factor[2];  // [steps, n] of 4 bytes, or null
  float4* parts;  // sums of a tile for each CTA, where these have equal ranges of half steps, or null
  int* done;      // whether a CTA's part is there: zeros between launches
  int m, n, steps, ld_out;  // n: rows of the planes
  int split;     // CTAs of a cluster, which share the columns
  int pair;      // the two CTAs of a cluster have neighbouring rows and share x, of which each brings half to both
  int gated;     // spans are of gate and of up
  int count;     // rows of the result, or of gate as of up
  int first[2];  // rows of the planes with which the spans of the first tile begin
};

// GROUPS warpgroups multiply STRIPS strips of 64 rows each, with so many registers a thread.
template <class F_, int TOKENS_, int GROUPS_, int STRIPS_, bool PAIRS_, int BATCH_ = 2>
struct WideBlocks {
  using F = F_;
  static constexpr int TOKENS = TOKENS_, GROUPS = GROUPS_, STRIPS = STRIPS_, X_STAGES = TOKENS > 128 ? 5 : 6;
  static constexpr int ROWS = GROUPS * STRIPS * STRIP_ROWS, SPAN = ROWS / 2;
  static constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128, REGISTERS = GROUPS == 2 ? 232 : GROUPS == 3 ? 152 : 104;
  static constexpr bool PAIRS = PAIRS_;  // may share x
  static constexpr int BATCH = BATCH_;  // steps of 16 columns whose products are asked for together
  static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 56;
  static constexpr int LOW_LINE = F::LOW_STEP / 2;  // bytes of a row's half step
  // Where a step has no more than 32 bytes, they come with both of its halves.
  static constexpr int HIGH_LINE = F::HIGH_STEP > 32 ? F::HIGH_STEP / 2 : F::HIGH_STEP;
  static constexpr bool WHOLE_HIGH = F::HIGH_STEP == 32, WHOLE_SCALES = F::BYTES && F::WORDS == 32;
  static constexpr int SETS = F::MINS && !F::NIBBLES ? 2 : 1;  // words of 8 bytes of a row's half step
  static constexpr int LOW_BYTES = ROWS * LOW_LINE, HIGH_BYTES = ROWS * HIGH_LINE;
  static constexpr int SCALE_AT = LOW_BYTES + HIGH_BYTES, FACTOR_AT = SCALE_AT + SETS * ROWS * 8;
  static constexpr int STAGE_BYTES = (FACTOR_AT + (F::BYTES ? ROWS * 4 : 0) + 1023) / 1024 * 1024;
  static constexpr int X_BYTES = TOKENS * 128;
  // Scales as numbers that a warp's lanes share, of 16 rows and a half step, twice: what is added goes with each.
  static constexpr int TABLE_BYTES = F::BYTES ? HALF_COLUMNS / F::WORDS * 16 * 8 : 0;
  static constexpr int TABLES_BYTES = CONSUMERS / 32 * 2 * TABLE_BYTES;
  static constexpr int FREE = WIDE_SHARED - 1024 - X_STAGES * (X_BYTES + 16) - 16 * WIDE_STAGES - TABLES_BYTES;
  static constexpr int STAGES = FREE / STAGE_BYTES < WIDE_STAGES ? FREE / STAGE_BYTES : WIDE_STAGES;
  static constexpr int RING_BYTES = STAGES * STAGE_BYTES + X_STAGES * X_BYTES, SUM_BYTES = ROWS * TOKENS * 4;
  static_assert(SUM_BYTES <= RING_BYTES && STAGES >= 2, "sums lie where the rings were");
};

// [stages of x], [stages of codes, scales, factors], tables, then barriers. `sm90_wide.py` reserves as much.
template <class C>
struct WideBlocksRing {
  uint32_t base, full, empty, x_full, x_empty;
  unsigned char* pointer;

  __device__ explicit WideBlocksRing(unsigned char* raw) {
    const uint32_t start = shared_address(raw);
    base = (start + 1023) & ~1023u;
    pointer = raw + (base - start);
    full = base + C::RING_BYTES + C::TABLES_BYTES;
    empty = full + 8 * C::STAGES;
    x_full = empty + 8 * C::STAGES;
    x_empty = x_full + 8 * C::X_STAGES;
  }
  __device__ uint32_t x(int stage) const { return base + stage * C::X_BYTES; }
  __device__ float4* table(int warp, int turn) const {
    return reinterpret_cast<float4*>(pointer + C::RING_BYTES + (warp * 2 + turn) * C::TABLE_BYTES);
  }
  __device__ uint32_t planes_at(int stage) const { return C::X_STAGES * C::X_BYTES + stage * C::STAGE_BYTES; }
};

// A stage of a ring, and the parity of its barrier's phase that is waited for next.
template <int STAGES>
struct RingPlace {
  int stage = 0;
  uint32_t parity;

  __device__ explicit RingPlace(uint32_t first) : parity(first) {}
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// A CTA's tiles, and the half steps of each that are its own: all; with a split as many as a CTA of the cluster has; or,
// with parts, those of its range of the half steps of all tiles. A pair has the tiles of both, and one range.
template <class C>
struct WideBlocksWork {
  int token_tiles, tiles, halves;
  int member, clusters;  // of a pair, and how many there are, or CTAs
  int rank;              // in its cluster, or among ranges
  int tile, begin, end;
  int step, left;        // tiles to the next one; with parts half steps of the range that are left

  __device__ explicit WideBlocksWork(const WideBlockArguments& p) {
    token_tiles = (p.m + C::TOKENS - 1) / C::TOKENS;
    const int each = (p.gated ? C::SPAN : C::ROWS) << pair(p);
    tiles = (p.count + each - 1) / each * token_tiles;
    halves = 2 * p.steps;
    const int size = pair(p) ? 2 : p.split, cluster = blockIdx.x / size;
    clusters = gridDim.x / size, member = pair(p) ? blockIdx.x % 2 : 0;
    if (p.parts != nullptr) {
      // A CTA waits for parts of later ranges, so these begin before it.
      rank = clusters - 1 - cluster, step = 1;
      const int first = first_of(rank);
      left = first_of(rank + 1) - first, tile = first / halves, begin = first % halves, end = min(halves, begin + left);
      return;
    }
    rank = blockIdx.x % p.split, step = clusters, tile = cluster, left = 0;
    begin = halves * rank / p.split, end = halves * (rank + 1) / p.split;
  }
  static __device__ int pair(const WideBlockArguments& p) { return C::PAIRS ? p.pair : 0; }
  // The first half step of a range.
  __device__ int first_of(int range) const {
    return static_cast<int>(static_cast<int64_t>(tiles) * halves * range / clusters);
  }
  __device__ int rank_in_cluster(const WideBlockArguments& p) const { return p.split > 1 ? rank : member; }
  // Half steps of all its tiles, before the first one.
  __device__ int all(const WideBlockArguments& p) const {
    if (p.parts != nullptr) return left;
    return tile < tiles ? ((tiles - 1 - tile) / step + 1) * (end - begin) : 0;
  }
  __device__ bool there() const { return tile < tiles && begin < end; }
  __device__ void next(const WideBlockArguments& p) {
    tile += step;
    if (p.parts == nullptr) return;
    left -= end - begin, begin = 0, end = min(halves, left);
  }
  // The first row of its first span, from that of the first tile on.
  __device__ int row(const WideBlockArguments& p) const {
    return ((tile / token_tiles << pair(p)) + member) * (p.gated ? C::SPAN : C::ROWS);
  }
  __device__ int token() const { return tile % token_tiles * C::TOKENS; }
};

template <class C>
__device__ __forceinline__ void produce_wide_x(const CUtensorMap& x_map, const WideBlockArguments& p,
                                               const WideBlocksRing<C>& ring) {
  const uint64_t keep = policy_evict_last();
  RingPlace<C::X_STAGES> place(1);  // the release that allows a stage's next use
  grid_dependency_wait();
  proxy_fence_async_global();
  for (WideBlocksWork<C> work(p); work.there(); work.next(p)) {
    for (int box = 2 * work.begin; box < 2 * work.end; box++) {
      mbarrier_wait(ring.x_empty + 8 * place.stage, place.parity);
      const uint32_t full = ring.x_full + 8 * place.stage;
      mbarrier_arrive_expect(full, C::X_BYTES);
      const uint32_t to = ring.x(place.stage);
      if (C::PAIRS && p.pair) {
        tensor_multicast_2d(to + work.member * (C::X_BYTES / 2), &x_map, box * X_COLUMNS,
                            work.token() + work.member * (C::TOKENS / 2), full, 3, keep);
      } else {
        tensor_load_2d(to, &x_map, box * X_COLUMNS, work.token(), full, keep);
      }
      place.next();
    }
  }
}

// Of a span's rows as many as there are: codes of others come as zeros, their scales not at all.
template <class C>
__device__ __forceinline__ int rows_of_span(const WideBlockArguments& p, int row, int span) {
  return max(0, min(C::SPAN, p.count - row - (p.gated ? 0 : span * C::SPAN)));
}

// Codes, by a warp that says how many bytes a stage has.
template <class C>
__device__ __forceinline__ void produce_codes(const PlaneMaps& maps, const WideBlockArguments& p,
                                              const WideBlocksRing<C>& ring) {
  using F = typename C::F;
  const uint64_t policy = p.m <= C::TOKENS ? policy_evict_first() : policy_evict_normal();
  RingPlace<C::STAGES> place(1);
  for (WideBlocksWork<C> work(p); work.there(); work.next(p)) {
    const int row = work.row(p), rows = rows_of_span<C>(p, row, 0) + rows_of_span<C>(p, row, 1);
    const int bytes = C::LOW_BYTES + C::HIGH_BYTES + rows * (8 * C::SETS + (F::BYTES ? 4 : 0));
#pragma unroll 1
    for (int half = work.begin; half < work.end; half++) {
      mbarrier_wait(ring.empty + 8 * place.stage, place.parity);
      const uint32_t to = ring.base + ring.planes_at(place.stage), full = ring.full + 8 * place.stage;
      mbarrier_arrive_expect(full, bytes);
#pragma unroll
      for (int span = 0; span < 2; span++) {
        const int at = span * C::SPAN, first = p.first[span] + row;
        tensor_load_2d(to + at * C::LOW_LINE, &maps.low[span], half * C::LOW_LINE, first, full, policy);
        if constexpr (F::HIGH > 0) {
          const int column = C::WHOLE_HIGH ? half / 2 * C::HIGH_LINE : half * C::HIGH_LINE;
          tensor_load_2d(to + C::LOW_BYTES + at * C::HIGH_LINE, &maps.high[span], column, first, full, policy);
        }
      }
      place.next();
    }
  }
}

// Scales and factors.
template <class C>
__device__ __forceinline__ void produce_scales(const WideBlockArguments& p, const WideBlocksRing<C>& ring) {
  using F = typename C::F;
  const uint64_t policy = policy_evict_normal();  // both halves of a step may need them
  RingPlace<C::STAGES> place(1);
  for (WideBlocksWork<C> work(p); work.there(); work.next(p)) {
    const int row = work.row(p);
#pragma unroll 1
    for (int half = work.begin; half < work.end; half++) {
      mbarrier_wait(ring.empty + 8 * place.stage, place.parity);
      const uint32_t to = ring.base + ring.planes_at(place.stage), full = ring.full + 8 * place.stage;
#pragma unroll 1
      for (int span = 0; span < 2; span++) {
        const int at = span * C::SPAN, rows = rows_of_span<C>(p, row, span);
        const int64_t step = half / 2, first = p.first[span] + row;
        if (rows == 0) break;
#pragma unroll
        for (int set = 0; set < C::SETS; set++) {
          const int64_t word = step * F::SCALE_WORDS + set * (F::SCALE_WORDS / 2) + (C::WHOLE_SCALES ? 0 : half % 2);
          bulk_load(to + C::SCALE_AT + (set * C::ROWS + at) * 8, p.scale[span] + (word * p.n + first) * 8, rows * 8,
                    full, policy);
        }
        if constexpr (F::BYTES) {
          bulk_load(to + C::FACTOR_AT + at * 4, p.factor[span] + (step * p.n + first) * 4, rows * 4, full, policy);
        }
      }
      place.next();
    }
  }
}

}  // namespace stoker
