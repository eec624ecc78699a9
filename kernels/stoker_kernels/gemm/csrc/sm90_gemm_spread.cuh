// y[M, N] = x[M, K] · W[N, K]ᵀ for 65 to 256 tokens in one round of CTAs, for sm_90a. A CTA multiplies all tokens with ROWS
// rows of W and one part of K. ROWS is any multiple of eight, so that tiles × parts are next to all of the CTAs that run
// at once, whatever N is; and with K in parts a tile can be so large that L2, which gives an SM some 39 bytes a cycle,
// keeps up with the tensor cores, and reads W once.
//
// A cluster is `share` neighbouring tiles × `parts` parts of K, as in sm90_gemm_multicast.cuh: the CTAs of a part read the
// same x, of which each loads its share of the tokens and multicasts it to all. The CTAs of a tile exchange their sums
// through distributed shared memory, each a part of the columns, in the order of the parts: a token's bits do not depend
// on who sums, nor on other tokens.
//
// Tokens are wgmma's M side, 64 a consumer warpgroup, rows of W its N side. One producer thread streams W and x by TMA into
// a ring of `stages` k blocks of 128 bytes, filled with W before the wait for the previous kernel. After the last k block
// the ring is free: sums lie where it was, behind a barrier of the cluster that says that every CTA has read its ring.
#pragma once
#include <cuda.h>

#include "sm90_gemm_multicast.cuh"
#include "store_eights.cuh"

namespace stoker {

template <int ROWS_, int GROUPS_>
struct SpreadSize {
  static constexpr int ROWS = ROWS_, GROUPS = GROUPS_, TOKENS = 64 * GROUPS, EIGHTS = ROWS / 8;
  static constexpr int CONSUMERS = GROUPS * GROUP_THREADS;
  // Three groups and more need what registers a warpgroup that only loads does without.
  static constexpr bool SHARES_REGISTERS = GROUPS > 2;
  static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 112;
  static constexpr int THREADS = CONSUMERS + (SHARES_REGISTERS ? GROUP_THREADS : 32);
  // Rows of one instruction: a warp of many has not as many registers at once as an instruction of all would want.
  static constexpr int COLUMNS = (GROUPS == 3 && ROWS > 192) || (GROUPS == 4 && ROWS > 136) ? ROWS / 2 : ROWS;
};

// The eights of columns that one part of K sums, and where it keeps what it gets: [parts][groups][owned] blocks of an
// eight × 64 tokens, a thread's four sums together.
template <typename SIZE>
struct SpreadSums {
  static constexpr int block_bytes = GROUP_THREADS * 16;
  int parts, owned;  // owned: the most of any part

  __device__ explicit SpreadSums(int parts_) : parts(parts_), owned((SIZE::EIGHTS + parts_ - 1) / parts_) {}
  __device__ int first(int part) const { return part * SIZE::EIGHTS / parts; }
  __device__ int count(int part) const { return first(part + 1) - first(part); }
  __device__ int bytes() const { return parts * SIZE::GROUPS * owned * block_bytes; }
  __device__ int offset(int from, int group, int index) const {
    return ((from * SIZE::GROUPS + group) * owned + index) * block_bytes;
  }
};

// [stages of W and x][full][empty][received]; in the end sums lie on the stages. spread.py reserves as much.
template <typename SIZE>
struct SpreadRing {
  static constexpr int w_bytes = SIZE::ROWS * 128, x_bytes = SIZE::TOKENS * 128, stage_bytes = w_bytes + x_bytes;
  uint32_t base, full, empty, received;
  unsigned char* pointer;  // to base

  __device__ SpreadRing(unsigned char* raw, int stages, int parts) {
    const uint32_t start = shared_address(raw);
    base = (start + 1023) & ~1023u;
    pointer = raw + (base - start);
    full = base + max(stages * stage_bytes, SpreadSums<SIZE>(parts).bytes());
    empty = full + 8 * stages;
    received = empty + 8 * stages;
  }
  __device__ uint32_t w(int stage) const { return base + stage * stage_bytes; }
  __device__ uint32_t x(int stage) const { return base + stage * stage_bytes + w_bytes; }
};

// The boxes of tokens that x is loaded by. One that would reach beyond the last token, which TMA takes much longer for,
// begins earlier: its first tokens are there twice.
template <typename SIZE>
struct SpreadBoxes {
  int tokens, last;  // of a box; the start of the last one there can be

  __device__ SpreadBoxes(int share, int m) : tokens(SIZE::TOKENS / max(share, 2)), last(max(m - tokens, 0)) {}
  __device__ int start(int box) const { return min(box * tokens, last); }
};

template <typename T, typename SIZE>
__device__ __forceinline__ void produce_spread(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                               const MulticastPart& mine, const SpreadRing<SIZE>& ring, int stages,
                                               int m) {
  const uint64_t once = policy_evict_first(), keep = policy_evict_last();
  const int units = mine.end - mine.begin, ahead = min(units, stages);
  const SpreadBoxes<SIZE> boxes(mine.share, m);
  const auto everyone = static_cast<uint16_t>(((1 << mine.share) - 1) << mine.part * mine.share);
  const bool issues = threadIdx.x % 32 == 0;
  auto load_w = [&](int i, int stage) {
    mbarrier_arrive_expect(ring.full + 8 * stage, ring.stage_bytes);
    tensor_load_2d(ring.w(stage), &w_map, (mine.begin + i) * Chunk<T>::elements, mine.tile * SIZE::ROWS,
                   ring.full + 8 * stage, once);
  };
  auto load_x = [&](int i, int stage) {
    const int k = (mine.begin + i) * Chunk<T>::elements, full = ring.full + 8 * stage;
    if (mine.share == 1) {
      tensor_load_2d(ring.x(stage), &x_map, k, 0, full, keep);
      tensor_load_2d(ring.x(stage) + boxes.tokens * 128, &x_map, k, boxes.start(1), full, keep);
    } else {
      const uint32_t to = ring.x(stage) + mine.member * boxes.tokens * 128;
      tensor_multicast_2d(to, &x_map, k, boxes.start(mine.member), full, everyone, keep);
    }
  };
  if (issues) {
    for (int i = 0; i < ahead; ++i) load_w(i, i);
  }
  __syncwarp();
  cluster_wait();  // every CTA of the cluster has started and set up its barriers
  if (!issues) return;
  grid_dependency_wait();
  proxy_fence_async_global();
  for (int i = 0; i < ahead; ++i) load_x(i, i);
  int stage = 0;
  uint32_t parity = 0;  // of the stage's release, by all CTAs of the part, that allows its next use
  for (int i = ahead; i < units; ++i) {
    mbarrier_wait(ring.empty + 8 * stage, parity);
    load_w(i, stage);
    load_x(i, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

// Multiplies this CTA's part of K.
template <typename T, typename SIZE>
__device__ __forceinline__ void multiply_spread(const MulticastPart& mine, const SpreadRing<SIZE>& ring, int stages,
                                                int group, typename Chunk<T>::Sum (&sums)[SIZE::ROWS / 2]) {
  const int lane = threadIdx.x % 32, units = mine.end - mine.begin;
  auto release = [&](int i, int held) {  // in every CTA of the part: each one's producer writes to all
    if (i + stages >= units) return;     // only for those who wait: a CTA whose producer is done may have ended
    if (mine.share == 1) {
      if (lane == 0) mbarrier_arrive(ring.empty + 8 * held);
    } else if (lane < mine.share) {
      mbarrier_arrive_cluster(cluster_address(ring.empty + 8 * held, mine.part * mine.share + lane));
    }
  };
  int stage = 0, held = 0;  // held: the stage before
  uint32_t parity = 0;
  for (int i = 0; i < units; ++i) {
    mbarrier_wait(ring.full + 8 * stage, parity);
    const uint64_t x = wgmma_descriptor(ring.x(stage) + group * 64 * 128), w = wgmma_descriptor(ring.w(stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int first = 0; first < SIZE::ROWS; first += SIZE::COLUMNS) {
        auto& some = reinterpret_cast<typename Chunk<T>::Sum(&)[SIZE::COLUMNS / 2]>(sums[first / 2]);
        Wgmma<T, SIZE::COLUMNS>::multiply(some, x + step * 2, w + first * 8 + step * 2, i + step != 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) release(i - 1, held);
    held = stage;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
  wgmma_results(sums);
}

// Sends every eight of columns to the CTA of the tile that sums it.
template <typename SIZE, typename S>
__device__ __forceinline__ void send_sums(const SpreadSums<SIZE>& of, const MulticastPart& mine,
                                          const SpreadRing<SIZE>& ring, int group, const S (&sums)[SIZE::ROWS / 2]) {
  const int t = threadIdx.x % GROUP_THREADS, from = of.offset(mine.part, group, 0) + t * 16;
  int to = 0, first = 0, end = of.first(1);
#pragma unroll
  for (int i = 0; i < SIZE::EIGHTS; ++i) {
    while (i == end) first = end, end = of.first(++to + 1);  // more than once where a part has none
    const int place = from + (i - first) * of.block_bytes;
    if (of.parts == 1) {
      *reinterpret_cast<typename Scaled<S>::Four*>(ring.pointer + place) = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2],
                                                                            sums[4 * i + 3]};
    } else {
      const int rank = to * mine.share + mine.member;
      store_async(cluster_address(ring.base + place, rank), sums[4 * i], sums[4 * i + 1], sums[4 * i + 2],
                  sums[4 * i + 3], cluster_address(ring.received + 8 * group, rank));
    }
  }
}

// Adds what the parts have sent of this CTA's columns, scales it, and stores it, 16 bytes a lane.
template <typename S, typename SIZE>
__device__ __forceinline__ void store_spread(const GemmArguments& g, const SpreadSums<SIZE>& of, const MulticastPart& mine,
                                             const SpreadRing<SIZE>& ring, int group) {
  const int t = threadIdx.x % GROUP_THREADS, q = t % 4, place = group * 64 + t / 32 * 16 + t % 32 / 4;
  const SpreadBoxes<SIZE> boxes(mine.share, g.m);
  const int box = place / boxes.tokens, token = boxes.start(box) + place % boxes.tokens;  // the second one is 8 further
  const int count = of.count(mine.part), first = mine.tile * SIZE::ROWS + of.first(mine.part) * 8;
  float x_scale[2] = {1.f, 1.f};
  if (g.x_scale) {
    x_scale[0] = g.x_scale[min(token, g.m - 1)];
    x_scale[1] = g.x_scale[min(token + 8, g.m - 1)];
  }
  for (int i = 0; i < count; i += 4) {
    uint32_t words[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      S sum[4] = {};
      float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f};
      const int column = min(first + (i + j) * 8 + 2 * q, g.n - 2);
      if (i + j < count) {
#pragma unroll 4
        for (int part = 0; part < of.parts; ++part) {
          const auto v = *reinterpret_cast<const typename Scaled<S>::Four*>(ring.pointer + of.offset(part, group, i + j) +
                                                                            t * 16);
          sum[0] += v.x;
          sum[1] += v.y;
          sum[2] += v.z;
          sum[3] += v.w;
        }
        if (g.w_scale) {
          scale[0] = g.w_scale[column * g.w_scale_step];
          scale[1] = g.w_scale[(column + 1) * g.w_scale_step];
        }
        if (g.bias) {
          const uint32_t two = *reinterpret_cast<const uint32_t*>(g.bias + column);
          bias[0] = __uint_as_float(two << 16);
          bias[1] = __uint_as_float(two & 0xffff0000u);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        words[h][j] = pack_bf16(Scaled<S>::with_bias(sum[2 * h], x_scale[h], scale[0], bias[0]),
                                Scaled<S>::with_bias(sum[2 * h + 1], x_scale[h], scale[1], bias[1]));
      }
    }
    const int at = first + (i + q) * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      transpose_quad(words[h]);
      if (i + q < count && at < g.n && token + 8 * h >= box * boxes.tokens && token + 8 * h < g.m) {
        *reinterpret_cast<uint4*>(g.out + static_cast<int64_t>(token + 8 * h) * g.ld_out + at) =
            make_uint4(words[h][0], words[h][1], words[h][2], words[h][3]);
      }
    }
  }
}

template <typename T, typename SIZE>
__device__ __forceinline__ void sm90_gemm_spread(const CUtensorMap& w_map, const CUtensorMap& x_map,
                                                 const GemmArguments& g) {
  extern __shared__ unsigned char raw[];
  const MulticastPart mine(cluster_rank(), cluster_size(), g.share, g.k_blocks);
  const SpreadSums<SIZE> of(mine.split);
  const SpreadRing<SIZE> ring(raw, g.stages, mine.split);
  const bool producer = threadIdx.x >= SIZE::CONSUMERS;
  if (threadIdx.x == SIZE::CONSUMERS) {
    tensor_map_prefetch(&w_map);
    tensor_map_prefetch(&x_map);
    for (int s = 0; s < g.stages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, mine.share * SIZE::GROUPS * 4);  // one arrival per consumer warp of the part
    }
    for (int group = 0; group < SIZE::GROUPS; ++group) mbarrier_init(ring.received + 8 * group, 1);
    mbarrier_init_fence();
    const uint32_t bytes = mine.split * of.count(mine.part) * of.block_bytes;  // of one part alone nobody waits
    for (int group = 0; group < SIZE::GROUPS && mine.split > 1; ++group) {
      mbarrier_arrive_expect(ring.received + 8 * group, bytes);
    }
  }
  __syncthreads();
  cluster_arrive();
  launch_dependents();
  if (producer) {
    if constexpr (SIZE::SHARES_REGISTERS) registers_shrink<SIZE::PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == SIZE::CONSUMERS / 32) {
      return produce_spread<T>(w_map, x_map, mine, ring, g.stages, g.m);
    }
    return cluster_wait();
  }
  if constexpr (SIZE::SHARES_REGISTERS) registers_grow<SIZE::CONSUMER_REGISTERS>();
  const int group = threadIdx.x / GROUP_THREADS;
  using Sum = typename Chunk<T>::Sum;
  Sum sums[SIZE::ROWS / 2];
  cluster_wait();
  grid_dependency_wait();
  multiply_spread<T>(mine, ring, g.stages, group, sums);
  cluster_arrive();  // this CTA has read its ring, and nothing is on the way to it
  cluster_wait();
  send_sums(of, mine, ring, group, sums);
  if (mine.split > 1) mbarrier_wait_cluster(ring.received + 8 * group, 0);
  store_spread<Sum>(g, of, mine, ring, group);
}

}  // namespace stoker

#define STOKER_SM90_GEMM_SPREAD(NAME, T, ROWS, TOKENS)                                                                  \
  extern "C" __global__ void __launch_bounds__(stoker::SpreadSize<ROWS, TOKENS / 64>::THREADS, 1)                       \
      NAME##_n##ROWS##_m##TOKENS(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,  \
                                 const __grid_constant__ stoker::GemmArguments g) {                                     \
    stoker::sm90_gemm_spread<T, stoker::SpreadSize<ROWS, TOKENS / 64>>(w_map, x_map, g);                                \
  }

// Every compiled size; spread.py has the same.
#define STOKER_SM90_GEMM_SPREAD_FEW(NAME, T, TOKENS)  \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 64, TOKENS)        \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 72, TOKENS)        \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 80, TOKENS)        \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 88, TOKENS)        \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 96, TOKENS)        \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 104, TOKENS)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 112, TOKENS)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 120, TOKENS)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 128, TOKENS)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 136, TOKENS)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 144, TOKENS)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 160, TOKENS)
#define STOKER_SM90_GEMM_SPREAD_EVERY(NAME, T)    \
  STOKER_SM90_GEMM_SPREAD_FEW(NAME, T, 128)       \
  STOKER_SM90_GEMM_SPREAD_FEW(NAME, T, 192)       \
  STOKER_SM90_GEMM_SPREAD_FEW(NAME, T, 256)       \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 176, 128)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 192, 128)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 208, 128)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 224, 128)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 240, 128)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 256, 128)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 176, 192)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 192, 192)      \
  STOKER_SM90_GEMM_SPREAD(NAME, T, 208, 192)
