// y = x · Wᵀ of more tokens than a few with GGUF's planes, by wgmma with weights from registers.
//
// Warpgroups multiply strips of 64 rows with TOKENS tokens; warps of a further one bring planes and x to shared memory
// (wide_ring.cuh). Weights of a batch of steps of 16 columns are made in registers, those of block_rows.cuh bit for bit but
// for a power of two, while the tensor cores work on the batch before. A lane's words of codes hold its pairs of columns of several
// steps: those of an operand of wgmma, as a word has neighbouring columns of one place or of several.
//
// A lane has two rows of a strip. They are neighbours, which it stores as one word, or with gate and up one of each. CTAs
// take tiles in turn; with a split a cluster shares the columns of one tile, and sums over its CTAs in order. Or each CTA
// has as many half steps as any other, of all tiles one after the other: who begins a tile adds what others have of it.
#pragma once
#include "silu.cuh"
#include "wgmma.cuh"
#include "wide_units.cuh"

namespace stoker {

// The upper half of wgmma_descriptor: a step along K changes the lower one alone.
constexpr uint64_t X_DESCRIPTOR_TOP = (1ull << 62) | (64ull << 32);

// Gives boxes of x back: in both CTAs of a pair, as each one's producer writes to both.
template <class C>
struct BoxRelease {
  uint32_t barriers;  // of the CTA that is this lane's to tell
  bool tells;
  int awaited;  // releases that producers wait for: another would be on its way when that CTA has ended

  __device__ BoxRelease(const WideBlockArguments& p, const WideBlocksRing<C>& ring, const WideBlocksWork<C>& work) {
    const int lane = threadIdx.x % 32;
    tells = lane < (C::PAIRS && p.pair ? 2 : 1);
    barriers = ring.x_empty;
    if constexpr (C::PAIRS) {
      barriers = cluster_address(ring.x_empty, p.pair ? lane % 2 : work.rank_in_cluster(p));
      awaited = 2 * work.all(p) - C::X_STAGES;
    }
  }
  __device__ __forceinline__ void operator()(int stage) {
    if constexpr (C::PAIRS) {
      if (awaited-- > 0 && tells) mbarrier_arrive_cluster(barriers + 8 * stage);
    } else {
      if (tells) mbarrier_arrive(barriers + 8 * stage);
    }
  }
};

// All half steps of one tile into `sums`; stages are given back to the producers.
template <class C>
__device__ __forceinline__ void multiply_planes(const WideBlocksRing<C>& ring, const WideBlocksWork<C>& work,
                                                const LaneRows<C>& lane_rows, uint32_t magic, RingPlace<C::STAGES>& place,
                                                RingPlace<C::X_STAGES>& x_place, BoxRelease<C>& release,
                                                float (&sums)[C::STRIPS][C::TOKENS / 2]) {
  using Unit = WideUnit<C>;
  constexpr int BATCH = C::BATCH, BATCHES = Unit::COLUMNS / (16 * BATCH), BOX_BATCHES = X_COLUMNS / (16 * BATCH);
  const int lane = threadIdx.x % 32, c = lane % 4;
  uint32_t a[2][BATCH][4];
  int held = -1, x_held = -1, turn = 0;
#pragma unroll 1
  for (int half = work.begin; half < work.end; half++) {
    mbarrier_wait(ring.full + 8 * place.stage, place.parity);
    const unsigned char* stage = ring.pointer + ring.planes_at(place.stage);
    const int x_first = x_place.stage;
    int x_now = x_first;
    uint32_t x[2];
#pragma unroll
    for (int s = 0; s < C::STRIPS; s++) {
      const int rows[2] = {lane_rows.row[0] + s * lane_rows.stride, lane_rows.row[1] + s * lane_rows.stride};
      float4* table = nullptr;
      ScaleTable<C> scales;
      if constexpr (C::F::BYTES) {
        table = ring.table(threadIdx.x / 32, turn);
        turn ^= 1;
        ScaleTable<C>::fill(stage, lane_rows.table + s * lane_rows.stride, half, magic, table);
      }
#pragma unroll
      for (int group = 0; group < Unit::GROUPS; group++) {
        Unit unit;
        unit.read(stage, rows, group, half, c);
        if (C::F::BYTES && group == 0) __syncwarp();
#pragma unroll
        for (int b = 0; b < BATCHES; b++) {
          const int batch = group * BATCHES + b, box = batch / BOX_BATCHES;
          if (s == 0 && batch % BOX_BATCHES == 0) {
            mbarrier_wait(ring.x_full + 8 * x_place.stage, x_place.parity);
            x[box] = static_cast<uint32_t>(wgmma_descriptor(ring.x(x_place.stage)));
            x_now = x_place.stage;
            x_place.next();
          }
#pragma unroll
          for (int i = 0; i < BATCH; i++) unit.weights(group, BATCH * b + i, magic, table, scales, a[batch % 2][i]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < BATCH; i++)
            WgmmaRegisters<__nv_bfloat16, C::TOKENS, false>::multiply(
                sums[s], a[batch % 2][i], X_DESCRIPTOR_TOP | (x[box] + (batch % BOX_BATCHES * BATCH + i) * 2),
                half != work.begin || batch + i != 0);
          wgmma_commit();
          wgmma_wait<1>();
          // What the batch before read last.
          if (s == 0 && batch == 0 && held >= 0) {
            if (lane == 0) mbarrier_arrive(ring.empty + 8 * held);
            release(x_held);
          }
          if (s == C::STRIPS - 1 && batch == BOX_BATCHES) release(x_first);
        }
      }
    }
    held = place.stage, x_held = x_now;
    place.next();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int s = 0; s < C::STRIPS; s++) wgmma_results(sums[s]);
  if (held >= 0) {
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * held);
    release(x_held);
  }
}

// Eight tokens of a strip, of which a lane has two of two rows: v[0], v[1] of the first row.
struct WideStore {
  const WideBlockArguments& p;
  int row, token;  // of the tile's result
  bool odd_first;
  float bias[2];

  // `rows`: those of the strip within the tile.
  template <class C>
  static __device__ __forceinline__ WideStore of(const WideBlockArguments& p, const WideBlocksWork<C>& work,
                                                 const int (&rows)[2]) {
    const int lane = threadIdx.x % 32;
    const int row = work.row(p) + (p.gated ? rows[0] & ~1 : min(rows[0], rows[1]));
    WideStore store{p, row, work.token() + lane % 4 * 2, rows[0] > rows[1], {0.f, 0.f}};
    if (p.bias != nullptr && row < p.count) {
      store.bias[0] = __bfloat162float(p.bias[row]), store.bias[1] = __bfloat162float(p.bias[row + 1]);
    }
    return store;
  }
  __device__ __forceinline__ void put(int at, uint32_t rows) const {
    if (row < p.count && at < p.m)
      *reinterpret_cast<uint32_t*>(p.out + static_cast<int64_t>(at) * p.ld_out + row) = rows;
  }
  __device__ __forceinline__ void eight(int j, const float (&sums)[4]) const {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = sums[i] * 0x1p48f;
    if (p.gated) {
      // Lanes of neighbouring rows exchange a token each, so that either has both rows of one.
      const uint32_t tokens = silu_times(v, v + 2), other = __shfl_xor_sync(~0u, tokens, 4);
      const bool second = threadIdx.x / 4 % 2;
      put(token + 8 * j + second, second ? __byte_perm(other, tokens, 0x7632) : __byte_perm(tokens, other, 0x5410));
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float low = (odd_first ? v[2 + h] : v[h]) + bias[0], high = (odd_first ? v[h] : v[2 + h]) + bias[1];
      put(token + 8 * j + h, pack_bf16(low, high));
    }
  }
};

template <class C>
__device__ __forceinline__ void store_planes_tile(const WideBlockArguments& p, const WideBlocksWork<C>& work,
                                                  const LaneRows<C>& lane_rows, const float (&sums)[C::STRIPS][C::TOKENS / 2]) {
#pragma unroll
  for (int s = 0; s < C::STRIPS; s++) {
    const int rows[2] = {lane_rows.row[0] + s * lane_rows.stride, lane_rows.row[1] + s * lane_rows.stride};
    const WideStore store = WideStore::of<C>(p, work, rows);
#pragma unroll
    for (int j = 0; j < C::TOKENS / 8; j++) {
      const float v[4] = {sums[s][4 * j], sums[s][4 * j + 1], sums[s][4 * j + 2], sums[s][4 * j + 3]};
      store.eight(j, v);
    }
  }
}

// The cluster's CTAs each sum and store a share of the eights of tokens, from all CTAs in order.
template <class C>
__device__ __forceinline__ void sum_planes_tile(const WideBlockArguments& p, const WideBlocksRing<C>& ring,
                                                const WideBlocksWork<C>& work, const LaneRows<C>& lane_rows,
                                                const float (&sums)[C::STRIPS][C::TOKENS / 2]) {
  constexpr int EIGHTS = C::TOKENS / 8, MOST = 8;
  const int group = threadIdx.x / 128;
  float4* parts = reinterpret_cast<float4*>(ring.pointer) + group * C::STRIPS * EIGHTS * 128 + threadIdx.x % 128;
  named_barrier(1, C::CONSUMERS);  // everyone has read the rings
#pragma unroll
  for (int s = 0; s < C::STRIPS; s++)
#pragma unroll
    for (int j = 0; j < EIGHTS; j++)
      parts[(s * EIGHTS + j) * 128] = make_float4(sums[s][4 * j], sums[s][4 * j + 1], sums[s][4 * j + 2], sums[s][4 * j + 3]);
  cluster_sync();
#pragma unroll 1
  for (int s = 0; s < C::STRIPS; s++) {
    const int rows[2] = {lane_rows.row[0] + s * lane_rows.stride, lane_rows.row[1] + s * lane_rows.stride};
    const WideStore store = WideStore::of<C>(p, work, rows);
#pragma unroll 1
    for (int j = work.rank; j < EIGHTS; j += p.split) {
      const float4* from = parts + (s * EIGHTS + j) * 128;
      float4 part[MOST];
#pragma unroll
      for (int peer = 0; peer < MOST; peer++)
        part[peer] = peer < p.split ? read_peer(from, peer) : make_float4(0.f, 0.f, 0.f, 0.f);
      float v[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
#pragma unroll
      for (int peer = 1; peer < MOST; peer++)
        v[0] += part[peer].x, v[1] += part[peer].y, v[2] += part[peer].z, v[3] += part[peer].w;
      store.eight(j, v);
    }
  }
  cluster_sync();  // nobody leaves while its sums are read
}

// A tile's sums of a CTA that has not its first half steps, for the one that has.
template <class C>
__device__ __forceinline__ float4* part_of(const WideBlockArguments& p, int cta) {
  constexpr int EIGHTS = C::TOKENS / 8;
  return p.parts + (cta * C::GROUPS + threadIdx.x / 128) * (C::STRIPS * EIGHTS * 128) + threadIdx.x % 128;
}

template <class C>
__device__ __forceinline__ void leave_part(const WideBlockArguments& p, const WideBlocksWork<C>& work,
                                           const float (&sums)[C::STRIPS][C::TOKENS / 2]) {
  constexpr int EIGHTS = C::TOKENS / 8;
  const int cta = (work.rank << work.pair(p)) + work.member;
  float4* part = part_of<C>(p, cta);
#pragma unroll
  for (int s = 0; s < C::STRIPS; s++)
#pragma unroll
    for (int j = 0; j < EIGHTS; j++)
      part[(s * EIGHTS + j) * 128] = make_float4(sums[s][4 * j], sums[s][4 * j + 1], sums[s][4 * j + 2], sums[s][4 * j + 3]);
  named_barrier(1, C::CONSUMERS);
  if (threadIdx.x == 0) release_word(p.done + cta, 1);
}

// Adds what later ranges have of the tile, in order.
template <class C>
__device__ __forceinline__ void add_parts(const WideBlockArguments& p, const WideBlocksWork<C>& work,
                                          float (&sums)[C::STRIPS][C::TOKENS / 2]) {
  constexpr int EIGHTS = C::TOKENS / 8, AT_ONCE = 8;
  for (int range = work.rank + 1; work.first_of(range) < (work.tile + 1) * work.halves; range++) {
    const int cta = (range << work.pair(p)) + work.member;
    if (threadIdx.x % 32 == 0) wait_for_word(p.done + cta, 1);
    __syncwarp();
    const float4* part = part_of<C>(p, cta);
#pragma unroll
    for (int s = 0; s < C::STRIPS; s++)
#pragma unroll
      for (int first = 0; first < EIGHTS; first += AT_ONCE) {
        float4 more[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) more[i] = __ldcg(part + (s * EIGHTS + first + i) * 128);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          float* to = sums[s] + 4 * (first + i);
          to[0] += more[i].x, to[1] += more[i].y, to[2] += more[i].z, to[3] += more[i].w;
        }
      }
    named_barrier(1, C::CONSUMERS);  // nobody waits for the word any more
    if (threadIdx.x == 0) p.done[cta] = 0;
  }
}

template <class C>
__device__ __forceinline__ void consume_planes(const WideBlockArguments& p, const WideBlocksRing<C>& ring) {
  float sums[C::STRIPS][C::TOKENS / 2];
  const LaneRows<C> lane_rows(p.gated);
  const uint32_t magic = p.n > 0 ? PLANE_MAGIC : 0u;
  RingPlace<C::STAGES> place(0);
  RingPlace<C::X_STAGES> x_place(0);
  if (C::PAIRS && p.pair) cluster_wait();
  grid_dependency_wait();  // what is stored may still be read
  WideBlocksWork<C> work(p);
  BoxRelease<C> release(p, ring, work);
  for (; work.there(); work.next(p)) {
    multiply_planes<C>(ring, work, lane_rows, magic, place, x_place, release, sums);
    if (p.split > 1) return sum_planes_tile<C>(p, ring, work, lane_rows, sums);  // a cluster has one tile
    if (p.parts != nullptr) {
      if (work.begin > 0) {
        leave_part<C>(p, work, sums);
        continue;
      }
      add_parts<C>(p, work, sums);
    }
    store_planes_tile<C>(p, work, lane_rows, sums);
  }
}

template <class C>
__device__ __forceinline__ void blocks_wide(const CUtensorMap& x_map, const PlaneMaps& maps, const WideBlockArguments& p) {
  extern __shared__ unsigned char raw[];
  const WideBlocksRing<C> ring(raw);
  const int warp = threadIdx.x / 32;
  constexpr int CONSUMER_WARPS = C::CONSUMERS / 32;
  if (threadIdx.x == C::CONSUMERS) {
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < C::STAGES; s++) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, CONSUMER_WARPS);
    }
    for (int s = 0; s < C::X_STAGES; s++) {
      mbarrier_init(ring.x_full + 8 * s, 1);
      mbarrier_init(ring.x_empty + 8 * s, CONSUMER_WARPS << WideBlocksWork<C>::pair(p));
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (C::PAIRS && p.pair) cluster_arrive();
  launch_dependents();
  if (warp >= CONSUMER_WARPS) {
    registers_shrink<C::PRODUCER_REGISTERS>();
    if (C::PAIRS && p.pair) cluster_wait();  // the other CTA's barriers are set up
    if (threadIdx.x % 32 == 0) {
      if (warp == CONSUMER_WARPS) produce_wide_x<C>(x_map, p, ring);
      if (warp == CONSUMER_WARPS + 1) produce_codes<C>(maps, p, ring);
      if (warp == CONSUMER_WARPS + 2) produce_scales<C>(p, ring);
    }
    __syncwarp();
    if (p.split > 1) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    registers_grow<C::REGISTERS>();
    consume_planes<C>(p, ring);
  }
  if (C::PAIRS && p.pair) {  // neither leaves while the other may still write or arrive here
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace stoker
