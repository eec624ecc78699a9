// Experts' products for few tokens, where the bytes of the chosen experts are the limit: gate and up with their activation,
// and down with the weighted sum.
//
// Every SM streams rows of the chosen experts through a ring that TMA fills: 16 rows × 256 bytes a stage, of gate-up eight
// rows of gate beside the eight of up. A warp multiplies a stage by mma.sync, weights as A, the expert's tokens as B, and
// leaves its sums in shared memory; once those of all columns are there they are added in the order of the columns. Down
// takes the same rows of every chosen expert, so that a CTA adds up its rows of every token itself, choice by choice.
// For more than a token gate-up has no sums to add: a warp takes all columns of its rows, and none waits for another. By
// what its bytes take a job of eight warps is over in 1.4 µs of FP8, where a barrier of them all has cost a microsecond.
// A stage is asked for again by the warp that has read it, and is that warp's next time, too: nobody waits for an empty one.
//
// Gate-up lets down start only after its own wait: what the router wrote is settled then, and down fills its ring with the
// experts' rows while gate-up still runs. Both wait for the kernel before them ahead of reading rows of x.
// Where nobody has chosen before them, each CTA of both chooses for itself from the router's logits: gate-up after its wait,
// and down before it, since logits are settled like a plan. So the choice costs no kernel, and down needs none of gate-up's.
// Both go through a rehearsal before that, on whatever shared memory holds and with nothing stored: the experts' weights
// have pushed the kernel's code out of the caches, and it comes back while there is nothing else to do.
#pragma once
#include <cuda.h>

#include "few_plan.cuh"
#include "few_products.cuh"
#include "few_rows.cuh"

namespace stoker {

// A stage of some CTA: 16 rows and 256 columns of an expert, which is an index in the list. Gate-up goes through columns, then
// rows, then experts; down through columns, then experts, then rows. A job ends where the slowest of the first two begins anew.
template <bool gated>
struct FewPlace {
  int expert, row_tile, chunk, job = 0;

  __device__ __forceinline__ void advance(int stages, int chunks, int row_tiles, int experts) {
    chunk += stages;
    while (chunk >= chunks) {
      chunk -= chunks;
      if (gated) {
        ++job;
        if (++row_tile == row_tiles) row_tile = 0, ++expert;
      } else if (++expert == experts) {
        ++job;
        expert = 0, ++row_tile;
      }
    }
  }

  // Of gate-up, where a warp takes whole rows, every so-many-th job.
  __device__ __forceinline__ void skip(int jobs, int row_tiles) {
    job += jobs, row_tile += jobs;
    while (row_tile >= row_tiles) row_tile -= row_tiles, ++expert;
  }
  __device__ __forceinline__ void step(int chunks, int row_tiles) {
    if (++chunk == chunks) chunk = 0, skip(FEW_WARPS, row_tiles);
  }
};

template <FewKind kind, bool gated>
struct FewExperts : FewPlan<gated> {
  using Layout = FewLayout<kind>;
  static constexpr bool quantized = Layout::quantized;
  using Place = FewPlace<gated>;
  using Plan = FewPlan<gated>;
  using Plan::a, Plan::pairs, Plan::list, Plan::order, Plan::work, Plan::warp, Plan::lane, Plan::q, Plan::c;
  using Plan::bf16_bits, Plan::opened;

  const CUtensorMap& map;
  unsigned char* const ring;
  const int x_rows;
  // Rows of x are 16 bytes apart modulo 128, so that neighbours lie in other banks.
  const int pitch;
  // Of the shared memory behind the plan.
  float* const x_scale;
  unsigned char* const x;
  float* const parts;

  __device__ __forceinline__ FewExperts(const FewArguments& arguments, const CUtensorMap& tensor_map, unsigned char* base)
      : Plan(arguments, reinterpret_cast<int4*>(base + FEW_RING_BYTES + FEW_BARRIER_BYTES) - 1,
             base + FEW_RING_BYTES + FEW_BARRIER_BYTES),
        map(tensor_map),
        ring(base),
        x_rows(gated ? a.tokens : pairs),
        pitch(a.chunks * Layout::COLUMNS * 2 + 16),
        x_scale(Plan::end()),
        x(reinterpret_cast<unsigned char*>(x_scale + (x_rows + 3) / 4 * 4)),
        parts(reinterpret_cast<float*>(x + x_rows * pitch)) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return shared_address(ring + FEW_RING_BYTES) + 8 * stage; }

  __device__ __forceinline__ int boxes(const Place& at) const { return min(FEW_BOXES, a.boxes - at.chunk * FEW_BOXES); }

  // Where the map has a stage's first row, of gate-up its first eight.
  __device__ __forceinline__ int first_row(const Place& at) const {
    const int expert = list[at.expert].x;
    return gated ? expert * (a.rows / 4) + at.row_tile : expert * a.rows + at.row_tile * a.tile_rows;
  }

  __device__ __forceinline__ void ask_for(const Place& at, int stage, uint64_t policy) const {
    const int wanted = boxes(at), row = first_row(at);
    uint32_t to = shared_address(ring) + stage * FEW_STAGE_BYTES;
    int column = at.chunk * Layout::COLUMNS;
    mbarrier_arrive_expect(full(stage), wanted * 128 * (gated ? FEW_ROWS : a.tile_rows));
#pragma unroll 1
    for (int box = 0; box < wanted; ++box, to += FEW_BOX_BYTES, column += Layout::BOX_COLUMNS) {
      if (gated) {
        tensor_load_4d(to, &map, column, 0, 0, row, full(stage), policy);
      } else {
        tensor_load_2d(to, &map, column, row, full(stage), policy);
      }
    }
  }

  __device__ __forceinline__ void advance(Place& at, int stages) const {
    at.advance(stages, a.chunks, a.row_tiles, work->x);
  }

  // The first stages, which of down are on their way long before its x is there.
  __device__ __forceinline__ void fill(uint64_t policy) const {
    const int4 mine = *work;
    Place at{mine.y, mine.z, 0};
    if (gated && a.whole) return fill_whole(mine, policy);
#pragma unroll 1
    for (int stage = 0; stage < FEW_STAGES && at.job < mine.w && mine.x > 0; ++stage) {
      ask_for(at, stage, policy);
      advance(at, 1);
    }
  }

  __device__ __forceinline__ void fill_whole(const int4& mine, uint64_t policy) const {
#pragma unroll 1
    for (int of = 0; of < FEW_WARPS && mine.x > 0; ++of) {
      Place at{mine.y, mine.z, 0};
      at.skip(of, a.row_tiles);
#pragma unroll 1
      for (int stage = of; stage < FEW_STAGES && at.job < mine.w; stage += FEW_WARPS) {
        ask_for(at, stage, policy);
        at.step(a.chunks, a.row_tiles);
      }
    }
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  // The row of x of an expert's n-th token.
  __device__ __forceinline__ int row_of(int position) const { return gated ? order[position] : position; }

  // Where the sums of 16 rows lie: of a token of the job's expert, or of a pair.
  __device__ __forceinline__ float* sums_of(const Place& at, int n, int position) const {
    if (gated) return parts + (((at.job & 1) * a.chunks + at.chunk) * a.tokens + n) * FEW_PITCH;
    return parts + (order[position] * a.chunks + at.chunk) * FEW_PITCH;
  }

  __device__ __forceinline__ void run_stage(const Place& at, int stage, uint32_t parity, bool real) const {
    const int4 expert = list[at.expert];
    const int wanted = boxes(at);
    float scales[2][2] = {};
    if (kind == FewKind::BLOCK) load_block_scales(at, expert.x, scales);
    if (real) mbarrier_wait(full(stage), parity);
    const FewProducts<kind> products;
#pragma unroll 1
    for (int n0 = 0; n0 < expert.z; n0 += 8) {
      float sums[4] = {};
      const unsigned char* row = nullptr;
      if (n0 + q < expert.z) row = x + row_of(expert.y + n0 + q) * pitch + at.chunk * Layout::COLUMNS * 2;
      products.multiply(ring + stage * FEW_STAGE_BYTES, wanted, row, scales, sums);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = n0 + 2 * c + i, position = expert.y + n;
        if (n >= expert.z) continue;
        const float unit = quantized ? x_scale[row_of(position)] : 1.0f;
        float* to = sums_of(at, n, position) + q;
        to[0] = sums[i] * unit;
        to[8] = sums[i + 2] * unit;
      }
    }
  }

  // Of the lane's two rows and a stage's blocks of 128 columns.
  __device__ __forceinline__ void load_block_scales(const Place& at, int expert, float (&scales)[2][2]) const {
    const int wide = (a.columns + 127) / 128, high = (a.rows + 127) / 128;
    const int row = at.row_tile * a.tile_rows;
    const int low_block = gated ? expert * 2 * high + row / 128 : expert * high + min(row + q, a.rows - 1) / 128;
    const int high_block = gated ? low_block + high : expert * high + min(row + q + 8, a.rows - 1) / 128;
#pragma unroll
    for (int box = 0; box < 2; ++box) {  // a block beyond the last is never multiplied with
      if (at.chunk * 2 + box >= wide) break;
      scales[0][box] = a.scale[static_cast<int64_t>(low_block) * wide + at.chunk * 2 + box];
      scales[1][box] = a.scale[static_cast<int64_t>(high_block) * wide + at.chunk * 2 + box];
    }
  }

  // ---- what becomes of sums ----------------------------------------------------------------------------------------

  // A sum over all columns with the scale and the bias of a row, which counts those of all experts.
  __device__ __forceinline__ float settled(float total, int64_t row) const {
    if (kind == FewKind::CHANNEL) total *= a.scale[row];
    if (a.bias != nullptr) total += bf16_low(a.bias[row]);
    return total;
  }

  // Of gate-up: a thread a token and row.
  __device__ __forceinline__ void activate(const Place& at, bool real) const {
    const int4 expert = list[at.expert];
    const int n = threadIdx.x / 8, within = threadIdx.x % 8, row = at.row_tile * 8 + within;
    if (n >= expert.z) return;
    const float* sums = sums_of(at, n, 0) + within;
    float gate = 0.0f, up = 0.0f;
#pragma unroll 2
    for (int chunk = 0; chunk < a.chunks; ++chunk, sums += a.tokens * FEW_PITCH) gate += sums[0], up += sums[8];
    const int64_t stacked = static_cast<int64_t>(expert.x) * 2 * a.rows + row;
    const float result = opened(settled(gate, stacked), settled(up, stacked + a.rows));
    if (real) a.out[static_cast<int64_t>(expert.y + n) * a.rows + row] = bf16_bits(result);
  }

  // ---- the whole ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() const {
    const uint64_t policy = policy_evict_first();
    if (!gated) launch_dependents();
    if (threadIdx.x < FEW_STAGES) {
      mbarrier_init(full(threadIdx.x), 1);
      mbarrier_init_fence();
    }
    if (!gated) {
      read_plan(policy, true);
    } else {
      if (threadIdx.x == 0) Plan::pretend();
      __syncthreads();
    }
#pragma unroll 1
    for (int real = 0; real < 2; ++real) {
      if (real) {
        grid_dependency_wait();
        if (gated) launch_dependents();
      }
      // In one place, so that the rehearsal brings in the code that is used; of gate-up warp 0 rehearses this while the
      // others go on to the products.
      if (gated) read_plan(policy, real);
      __syncwarp();
      FewRows<kind>(a, real ? x_rows : min(x_rows, FEW_WARPS), pitch, x, x_scale).bring_rows();
      if (!gated || real) __syncthreads();
      if (gated && a.whole) {
        go_alone(policy, real);
        continue;
      }
      if (!gated && real && a.counts != nullptr && blockIdx.x == 0) Plan::count();
      go_through(policy, real);
    }
  }

  __device__ __forceinline__ void read_plan(uint64_t policy, bool real) const {
    Plan::read(real);
    if (threadIdx.x == 0 && real) fill(policy);
  }

  // Of gate-up, job by job a warp: all columns of eight rows of gate and of up, whose sums are those of a lane's tokens.
  // In a rehearsal one stage, the same for all.
  __device__ __forceinline__ void go_alone(uint64_t policy, bool real) const {
    const int4 mine = *work;
    const int jobs = mine.x == 0 ? 0 : real ? mine.w : min(mine.w, 1);
    Place at{mine.y, mine.z, 0};
    if (real) at.skip(warp, a.row_tiles);
    Place next = at;
    next.step(a.chunks, a.row_tiles);
    next.step(a.chunks, a.row_tiles);
    int stage = warp;
    uint32_t parity = 0;
    const FewProducts<kind> products;
#pragma unroll 1
    while (at.job < jobs) {
      const int4 expert = list[at.expert];
      const int64_t gate = static_cast<int64_t>(expert.x) * 2 * a.rows + at.row_tile * 8 + q, up = gate + a.rows;
      const unsigned char* row = q < expert.z ? x + row_of(expert.y + q) * pitch : nullptr;
      const float gate_scale = kind == FewKind::CHANNEL ? a.scale[gate] : 1.0f;
      const float up_scale = kind == FewKind::CHANNEL ? a.scale[up] : 1.0f;
      const float gate_bias = a.bias == nullptr ? 0.0f : bf16_low(a.bias[gate]);
      const float up_bias = a.bias == nullptr ? 0.0f : bf16_low(a.bias[up]);
      float sums[4] = {};
#pragma unroll 1
      for (at.chunk = 0; at.chunk < a.chunks; ++at.chunk) {
        float scales[2][2] = {};
        if (kind == FewKind::BLOCK) load_block_scales(at, expert.x, scales);
        if (real) mbarrier_wait(full(stage), parity);
        products.multiply(ring + stage * FEW_STAGE_BYTES, boxes(at), row, scales, sums);
        __syncwarp();
        if (!real) break;
        if (lane == 0 && next.job < jobs) ask_for(next, stage, policy);
        next.step(a.chunks, a.row_tiles);
        if (row != nullptr) row += Layout::COLUMNS * 2;
        stage += FEW_WARPS;
        if (stage >= FEW_STAGES) stage -= FEW_STAGES, parity ^= 1;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = 2 * c + i, position = expert.y + n;
        if (n >= expert.z) continue;
        const float unit = quantized ? x_scale[row_of(position)] : 1.0f;
        const float result = opened(sums[i] * unit * gate_scale + gate_bias, sums[i + 2] * unit * up_scale + up_bias);
        if (real) a.out[static_cast<int64_t>(position) * a.rows + at.row_tile * 8 + q] = bf16_bits(result);
      }
      at.skip(FEW_WARPS, a.row_tiles);
    }
    __syncthreads();
  }

  // In a rehearsal one stage a warp, of one job.
  __device__ __forceinline__ void go_through(uint64_t policy, bool real) const {
    const int4 mine = *work;
    const int jobs = real ? mine.w : min(mine.w, 1);
    Place job{mine.y, mine.z, 0}, at = job, next = job;  // `next`: what the warp's stage is asked for next
    if (mine.x > 0) {
      advance(at, warp);
      advance(next, warp + FEW_STAGES);
    }
    int stage = warp;
    uint32_t parity = 0;
#pragma unroll 1
    while (job.job < jobs) {
#pragma unroll 1
      while (at.job == job.job && mine.x > 0) {
        run_stage(at, stage, parity, real);
        __syncwarp();
        if (!real) break;
        if (lane == 0 && next.job < jobs) ask_for(next, stage, policy);
        advance(at, FEW_WARPS);
        advance(next, FEW_WARPS);
        stage += FEW_WARPS;
        if (stage >= FEW_STAGES) stage -= FEW_STAGES, parity ^= 1;
      }
      __syncthreads();
      if (gated) {
        activate(job, real);  // while the next job's sums go elsewhere
        advance(job, a.chunks);
      } else {
        Plan::add_choices(parts, job.row_tile, [&](float total, int64_t of) { return settled(total, of); }, real);
        __syncthreads();
        ++job.row_tile, ++job.job;
      }
    }
    if (gated) __syncthreads();
  }
};

template <FewKind kind, bool gated>
__device__ __forceinline__ void sm90_few_experts(const CUtensorMap& map, const FewArguments& a) {
  extern __shared__ unsigned char raw[];
  FewExperts<kind, gated>(a, map, raw + (-shared_address(raw) & 1023)).run();
}

}  // namespace stoker

#define STOKER_SM90_FEW_EXPERTS(name, kind, gated)                                                               \
  extern "C" __global__ void __launch_bounds__(stoker::FEW_THREADS, 2)                                           \
      name(const __grid_constant__ CUtensorMap map, const __grid_constant__ stoker::FewArguments a) {            \
    stoker::sm90_few_experts<stoker::FewKind::kind, gated>(map, a);                                              \
  }
