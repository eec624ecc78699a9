// What one CTA of the kernels of experts for few tokens has to do, and what becomes of sums: what those of weights in rings
// (sm90_few_experts.cuh) and of four bits (sm90_packed_experts.cuh) have in common.
#pragma once
#include "few_choice.cuh"

namespace stoker {

// `chooses`: where no router has left a plan, each CTA chooses for itself.
template <bool gated, bool chooses = true>
struct FewPlan {
  const FewArguments& a;
  const int pairs;
  // Of shared memory.
  int4* const work;      // experts, first expert, first row tile, jobs of this CTA
  int4* const list;      // expert, first position, tokens
  int* const order;      // of sorted pairs: of gate-up their rows of x
  int* const ids;        // of pairs, and what they weigh: of down, and where the choice is made here
  float* const weights;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane / 4, c = lane % 4;

  __device__ __forceinline__ FewPlan(const FewArguments& arguments, int4* own_work, unsigned char* base)
      : a(arguments),
        pairs(a.tokens * a.top_k),
        work(own_work),
        list(reinterpret_cast<int4*>(base)),
        order(reinterpret_cast<int*>(list + pairs)),
        ids(order + (pairs + 3) / 4 * 4),
        weights(reinterpret_cast<float*>(ids + (pairs + 3) / 4 * 4)) {}

  // Behind all of it.
  __device__ __forceinline__ float* end() const { return weights + (pairs + 3) / 4 * 4; }

  // ---- what there is to do -----------------------------------------------------------------------------------------

  // The experts that have tokens, and what of their weights this CTA takes. By warp 0.
  __device__ __forceinline__ void share_out() const {
    int found = 0;
#pragma unroll 1
    for (int base = 0; base < a.num_tiles; base += 32) {
      int expert = 0, begin = 0, end = 0;
      if (base + lane < a.num_tiles) {
        const int* tile = a.tiles + 3 * (base + lane);
        expert = load_int(tile), begin = load_int(tile + 1), end = load_int(tile + 2);
      }
      const uint32_t there = __ballot_sync(0xFFFFFFFFu, begin < end);
      if (begin < end) list[found + __popc(there & ((1u << lane) - 1))] = make_int4(expert, begin, end - begin, 0);
      found += __popc(there);
    }
    deal(found, true);
  }

  // The same where the choice is made here, of up to 32 pairs, a lane each: experts in the order of their first pairs.
  // A rehearsal leaves everything as it is but the ids of pairs, which nobody reads then.
  __device__ __forceinline__ void choose(bool real) const {
#pragma unroll 1
    for (int token = 0; token < a.tokens; ++token) FewChoice(a, ids, weights).choose(token, real, !gated);
    __syncwarp();
    const int expert = lane < pairs ? ids[lane] : -1;
    if (a.tokens == 1) {  // whose experts are all different ones, or none
      if (expert >= 0 && real) list[lane] = make_int4(expert, lane, 1, 0), order[lane] = kept(lane);
      return deal(__popc(__ballot_sync(0xFFFFFFFFu, expert >= 0)), real);
    }
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, expert), below = (1u << lane) - 1;
    const int leader = __ffs(same) - 1;
    const bool first = expert >= 0 && leader == lane;
    const uint32_t firsts = __ballot_sync(0xFFFFFFFFu, first);
    const int own = first ? __popc(same) : 0;
    int end = own;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xFFFFFFFFu, end, step);
      if (lane >= step) end += before;
    }
    const int begin = __shfl_sync(0xFFFFFFFFu, end - own, leader);
    if (first && real) list[__popc(firsts & below)] = make_int4(expert, begin, own, 0);
    if (expert >= 0 && real) order[begin + __popc(same & below)] = kept(lane);
    deal(__popc(firsts), real);
  }

  // What is kept of a pair: of gate-up its row of x.
  __device__ __forceinline__ int kept(int pair) const { return gated ? pair / a.top_k : pair; }

  // What this CTA takes of so many experts.
  __device__ __forceinline__ void deal(int found, bool real) const {
    const unsigned all = gated ? found * a.row_tiles : a.row_tiles;
    const unsigned first = blockIdx.x * all / gridDim.x, last = (blockIdx.x + 1) * all / gridDim.x;
    const unsigned expert = gated ? first / a.row_tiles : 0;
    if (lane == 0 && real) *work = make_int4(found, expert, first - expert * a.row_tiles, last - first);
    __syncwarp();
  }

  // The tokens of every expert, for who asks later.
  __device__ __forceinline__ void count() const {
#pragma unroll 1
    for (int expert = threadIdx.x; expert < a.experts; expert += FEW_THREADS) {
      int tokens = 0;
#pragma unroll 1
      for (int pair = 0; pair < pairs; ++pair) tokens += ids[pair] == expert;
      a.counts[expert] = tokens;
    }
  }

  // What the rehearsal of gate-up takes for the plan: one token of the first expert.
  __device__ __forceinline__ void pretend() const {
    *work = make_int4(1, 0, 0, 1);
    list[0] = make_int4(0, 0, 1, 0);
    order[0] = 0;
  }

  // By warp 0 the experts and this CTA's work, by warp 1 what a router has left, for its lanes.
  __device__ __forceinline__ void read(bool real) const {
    if (warp == 0) {
      __syncwarp();
      if (chooses && a.logits != nullptr) {
        choose(real);
      } else if (real) {
        share_out();
      }
    } else if (warp == 1 && (!chooses || a.logits == nullptr) && real) {
#pragma unroll 1
      for (int i = lane; i < pairs; i += 32) {
        order[i] = kept(load_int(a.order + i));
        if (!gated) {
          ids[i] = load_int(a.ids + i);
          weights[i] = __uint_as_float(load_int(reinterpret_cast<const int*>(a.weights) + i));
        }
      }
    }
  }

  // ---- what becomes of sums ----------------------------------------------------------------------------------------

  static __device__ __forceinline__ uint16_t bf16_bits(float x) { return static_cast<uint16_t>(pack_bf16(x, 0.0f)); }

  __device__ __forceinline__ float opened(float gate, float up) const {
    if (a.clamped) {
      gate = fminf(gate, a.limit);
      up = fminf(fmaxf(up, -a.limit), a.limit) + 1.0f;
    }
    return up * __fdividef(gate, 1.0f + __expf(-a.slope * gate));
  }

  // Of down: what each pair gives to a row, settled, rounded and weighed, in the place of its first sum; then a token's, added
  // up. `parts`: a pair's sums of each of a.chunks parts of the columns, in rows of FEW_PITCH.
  template <typename Settle>
  __device__ __forceinline__ void add_choices(float* parts, int row_tile, const Settle& settled, bool real) const {
    const int within = threadIdx.x % FEW_ROWS, row = row_tile * a.tile_rows + within;
    const bool inside = within < a.tile_rows && row < a.rows;
#pragma unroll 1
    for (int pair = threadIdx.x / FEW_ROWS; pair < pairs && inside; pair += FEW_THREADS / FEW_ROWS) {
      const int expert = ids[pair];
      float* sums = parts + pair * a.chunks * FEW_PITCH + within;
      float total = 0.0f;
#pragma unroll 2
      for (int chunk = 0; chunk < a.chunks; ++chunk) total += sums[chunk * FEW_PITCH];
      if (expert >= 0) total = settled(total, static_cast<int64_t>(expert) * a.rows + row);
      sums[0] = expert < 0 ? 0.0f : weights[pair] * bf16_low(bf16_bits(total));
    }
    __syncthreads();
    const int token = threadIdx.x / FEW_ROWS;
    if (token >= a.tokens || !inside) return;
    float total = 0.0f;
    const float* given = parts + token * a.top_k * a.chunks * FEW_PITCH + within;
#pragma unroll 2
    for (int choice = 0; choice < a.top_k; ++choice, given += a.chunks * FEW_PITCH) total += *given;
    if (a.shared != nullptr) {
      float beside = bf16_low(a.shared[static_cast<int64_t>(token) * a.ld_shared + row]);
      if (a.shared_gate != nullptr) beside = __fdividef(beside, 1.0f + __expf(-bf16_low(a.shared_gate[token])));
      total += beside;
    }
    if (real) a.out[static_cast<int64_t>(token) * a.rows + row] = bf16_bits(total);
  }
};

}  // namespace stoker
