// Choosing experts for some dozens of tokens and sorting their pairs by expert, in one CTA or a cluster of a few: what
// triton_route.py does in two kernels, with a launch between them.
//
// A warp chooses for a token after the other (few_choice.cuh) and marks each pair in its expert's row of bits. A row's
// bits are an expert's tokens in their order, so their number, the rows before it and the bits before a pair say where
// everything goes: nothing depends on which warp was first. A CTA of a cluster has neighbouring tokens and rows of their
// bits alone; all it needs of the others is how many pairs of an expert they have, which it reads from their memory.
// Before the wait for the router's product all of it runs once on zeros, with nothing stored, which brings the code into
// the SM: between two layers the experts' weights have taken it out of the L2.
#pragma once
#include "few_choice.cuh"

namespace stoker {

constexpr int ROUTE_MOST_THREADS = 1024, ROUTE_CTAS = 4;

struct RouteArguments {
  FewArguments choice;  // what FewChoice reads of it; the rest is null
  int* ids;             // [tokens, top_k]
  float* weights;       // [tokens, top_k]
  int* order;           // [tokens · top_k]
  int* tiles;           // [most, 3]: expert, first position, end
  int tile, most;       // tokens of a tile, and tiles that there is room for
};

template <int CTAS>
struct Route {
  const RouteArguments& r;
  const FewArguments& a;
  const int rank;      // of the CTA in its cluster
  const int from, to;  // its tokens
  const int pairs, words, warps;
  int* const ids;          // [pairs], of shared memory, as all that follows
  float* const weights;    // [pairs]
  unsigned* const marked;  // [experts, words]: the pairs of each, of this CTA's
  int* const begin;        // [experts]: pairs of those before, and of its own those of CTAs before
  int* const own_count;    // [experts]: pairs of this CTA's, of which the others read
  int* const sums;         // [32]: of warps
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ Route(const RouteArguments& arguments, unsigned char* base, int threads)
      : r(arguments),
        a(arguments.choice),
        rank(CTAS > 1 ? cluster_rank() : 0),
        from(min(rank * tokens_each(), a.tokens)),
        to(min(from + tokens_each(), a.tokens)),
        pairs(a.tokens * a.top_k),
        words((tokens_each() * a.top_k + 31) / 32),
        warps(threads / 32),
        ids(reinterpret_cast<int*>(base)),
        weights(reinterpret_cast<float*>(ids + pairs)),
        marked(reinterpret_cast<unsigned*>(weights + pairs)),
        begin(reinterpret_cast<int*>(marked + a.experts * words)),
        own_count(begin + a.experts),
        sums(own_count + a.experts) {}

  __device__ __forceinline__ int tokens_each() const { return (a.tokens + CTAS - 1) / CTAS; }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int real = 0; real < 2; ++real) {
      if (real) {
        grid_dependency_wait();
        launch_dependents();
      }
#pragma unroll 1
      for (int i = threadIdx.x; i < a.experts * words; i += 32 * warps) marked[i] = 0;
      __syncthreads();
#pragma unroll 1
      for (int token = from + warp; token < to; token += warps) choose(token, real);
      __syncthreads();
      lay_out(real);
      __syncthreads();
      sort(real);
      __syncthreads();
      if constexpr (CTAS > 1) cluster_wait();  // none reads counts of this pass any more
    }
  }

  __device__ __forceinline__ void choose(int token, bool real) const {
    FewChoice(a, ids, weights).choose(token, real, true);
    __syncwarp();
    if (lane >= a.top_k) return;
    const int pair = token * a.top_k + lane, expert = ids[pair];
    const int bit = pair - from * a.top_k;
    if (expert >= 0) atomicOr(marked + expert * words + bit / 32, 1u << bit % 32);
    if (real) r.ids[pair] = expert, r.weights[pair] = weights[pair];
  }

  // A thread an expert: where its pairs begin, its tiles, and how many tokens it has. Pairs and tiles are added up as
  // one number, tiles above.
  __device__ __forceinline__ void lay_out(bool real) const {
    int count = 0;
    const int expert = threadIdx.x;
    if (expert < a.experts) {
#pragma unroll 1
      for (int word = 0; word < words; ++word) count += __popc(marked[expert * words + word]);
    }
    int earlier = 0;
    if constexpr (CTAS > 1) {
      if (expert < a.experts) own_count[expert] = count;
      cluster_sync();
      if (expert < a.experts) {
        int of[CTAS];
#pragma unroll
        for (int other = 0; other < CTAS; ++other) of[other] = read_peer(own_count + expert, other);
        count = 0;
#pragma unroll
        for (int other = 0; other < CTAS; ++other) {
          count += of[other];
          if (other < rank) earlier += of[other];
        }
      }
    }
    const int own = count | (count + r.tile - 1) / r.tile << 16;
    int end = own;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xFFFFFFFFu, end, step);
      if (lane >= step) end += before;
    }
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    if constexpr (CTAS > 1) cluster_arrive();  // what was read of the others is in the sums
    int before = 0, all = 0;
#pragma unroll 1
    for (int other = 0; other < warps; ++other) {
      const int of = sums[other];
      all += of;
      if (other < warp) before += of;
    }
    const int start = before + end - own, first = start & 0xFFFF, used = all >> 16;
    if (expert < a.experts) {
      begin[expert] = first + earlier;
      const bool stored = real && rank == 0;
      if (stored && a.counts != nullptr) a.counts[expert] = count;
#pragma unroll 1
      for (int i = 0; i < own >> 16; ++i) {
        const int at = first + i * r.tile;
        if (stored) put((start >> 16) + i, expert, at, min(at + r.tile, first + count));
      }
    }
#pragma unroll 1
    for (int i = used + static_cast<int>(threadIdx.x); i < r.most; i += 32 * warps) {
      if (real && rank == 0) put(i, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void put(int tile, int expert, int from, int to) const {
    r.tiles[3 * tile] = expert, r.tiles[3 * tile + 1] = from, r.tiles[3 * tile + 2] = to;
  }

  // A thread a pair: behind those of the experts before, and of its own before it.
  __device__ __forceinline__ void sort(bool real) const {
#pragma unroll 1
    for (int bit = threadIdx.x; bit < (to - from) * a.top_k; bit += 32 * warps) {
      const int pair = from * a.top_k + bit;
      const int expert = ids[pair];
      if (expert < 0) continue;
      const unsigned* row = marked + expert * words;
      int place = begin[expert] + __popc(row[bit / 32] & ((1u << bit % 32) - 1));
#pragma unroll 1
      for (int word = 0; word < bit / 32; ++word) place += __popc(row[word]);
      if (real) r.order[place] = pair;
    }
  }
};

template <int CTAS>
__device__ __forceinline__ void sm90_route(const RouteArguments& a, int threads) {
  extern __shared__ unsigned char raw[];
  Route<CTAS>(a, raw, threads).run();
}

}  // namespace stoker
