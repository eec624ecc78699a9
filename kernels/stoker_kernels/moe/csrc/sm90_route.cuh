// Choosing experts for some dozens of tokens and sorting their pairs by expert, in one CTA: what triton_route.py does in
// two kernels, with a launch between them.
//
// A warp chooses for a token after the other (few_choice.cuh) and marks each pair in its expert's row of bits. A row's
// bits are an expert's tokens in their order, so their number, the rows before it and the bits before a pair say where
// everything goes: nothing depends on which warp was first.
// Before the wait for the router's product all of it runs once on zeros, with nothing stored, which brings the code into
// the SM: between two layers the experts' weights have taken it out of the L2.
#pragma once
#include "few_choice.cuh"

namespace stoker {

constexpr int ROUTE_MOST_THREADS = 1024;

struct RouteArguments {
  FewArguments choice;  // what FewChoice reads of it; the rest is null
  int* ids;             // [tokens, top_k]
  float* weights;       // [tokens, top_k]
  int* order;           // [tokens · top_k]
  int* tiles;           // [most, 3]: expert, first position, end
  int tile, most;       // tokens of a tile, and tiles that there is room for
};

struct Route {
  const RouteArguments& r;
  const FewArguments& a;
  const int pairs, words, warps;
  int* const ids;          // [pairs], of shared memory, as all that follows
  float* const weights;    // [pairs]
  unsigned* const marked;  // [experts, words]: the pairs of each
  int* const begin;        // [experts]: pairs of those before
  int* const sums;         // [32]: of warps
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ Route(const RouteArguments& arguments, unsigned char* base, int threads)
      : r(arguments),
        a(arguments.choice),
        pairs(a.tokens * a.top_k),
        words((pairs + 31) / 32),
        warps(threads / 32),
        ids(reinterpret_cast<int*>(base)),
        weights(reinterpret_cast<float*>(ids + pairs)),
        marked(reinterpret_cast<unsigned*>(weights + pairs)),
        begin(reinterpret_cast<int*>(marked + a.experts * words)),
        sums(begin + a.experts) {}

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
      for (int token = warp; token < a.tokens; token += warps) choose(token, real);
      __syncthreads();
      lay_out(real);
      __syncthreads();
      sort(real);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void choose(int token, bool real) const {
    FewChoice(a, ids, weights).choose(token, real, true);
    __syncwarp();
    if (lane >= a.top_k) return;
    const int pair = token * a.top_k + lane, expert = ids[pair];
    if (expert >= 0) atomicOr(marked + expert * words + pair / 32, 1u << pair % 32);
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
    const int own = count | (count + r.tile - 1) / r.tile << 16;
    int end = own;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xFFFFFFFFu, end, step);
      if (lane >= step) end += before;
    }
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll 1
    for (int other = 0; other < warps; ++other) {
      const int of = sums[other];
      all += of;
      if (other < warp) before += of;
    }
    const int start = before + end - own, first = start & 0xFFFF, used = all >> 16;
    if (expert < a.experts) {
      begin[expert] = first;
      if (real && a.counts != nullptr) a.counts[expert] = count;
#pragma unroll 1
      for (int i = 0; i < own >> 16; ++i) {
        const int from = first + i * r.tile;
        if (real) put((start >> 16) + i, expert, from, min(from + r.tile, first + count));
      }
    }
#pragma unroll 1
    for (int i = used + static_cast<int>(threadIdx.x); i < r.most; i += 32 * warps) {
      if (real) put(i, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void put(int tile, int expert, int from, int to) const {
    r.tiles[3 * tile] = expert, r.tiles[3 * tile + 1] = from, r.tiles[3 * tile + 2] = to;
  }

  // A thread a pair: behind those of the experts before, and of its own before it.
  __device__ __forceinline__ void sort(bool real) const {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += 32 * warps) {
      const int expert = ids[pair];
      if (expert < 0) continue;
      const unsigned* row = marked + expert * words;
      int place = begin[expert] + __popc(row[pair / 32] & ((1u << pair % 32) - 1));
#pragma unroll 1
      for (int word = 0; word < pair / 32; ++word) place += __popc(row[word]);
      if (real) r.order[place] = pair;
    }
  }
};

__device__ __forceinline__ void sm90_route(const RouteArguments& a, int threads) {
  extern __shared__ unsigned char raw[];
  Route(a, raw, threads).run();
}

}  // namespace stoker
