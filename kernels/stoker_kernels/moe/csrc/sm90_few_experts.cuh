// Experts' products for few tokens, where the bytes of the chosen experts are the limit: gate and up with their activation,
// and down with the weighted sum.
//
// Every SM streams rows of the chosen experts through a ring that TMA fills: 16 rows × 256 columns a stage, of gate-up eight
// rows of gate beside the eight of up. A warp multiplies a stage by mma.sync, weights as A, the expert's tokens as B, and
// leaves its sums in shared memory; once those of all columns are there they are added in the order of the columns. Down
// takes the same rows of every chosen expert, so that a CTA adds up its rows of every token itself, choice by choice.
// A stage is asked for again by the warp that has read it, so that nobody waits for an empty one.
//
// Gate-up lets down start only after its own wait: what the router wrote is settled then, and down fills its ring with the
// experts' rows while gate-up still runs. Both wait for the kernel before them ahead of reading rows of x.
#pragma once
#include <cuda.h>

#include "ptx.cuh"

namespace stoker {

constexpr int FEW_WARPS = 8, FEW_THREADS = 32 * FEW_WARPS;
constexpr int FEW_ROWS = 16;            // of the weight in a stage
constexpr int FEW_COLUMNS = 256;        // of the weight in a stage
constexpr int FEW_BOX_BYTES = 2048;     // 16 rows of 128 bytes
constexpr int FEW_RING_BYTES = 98304;
constexpr int FEW_BARRIER_BYTES = 256;
constexpr int FEW_PITCH = 20;           // floats from one token's sums of 16 rows to the next one's
constexpr float FEW_E4M3_UNIT = 1.0f / 448.0f, FEW_LEAST_SCALE = 1e-12f;

enum class FewKind { BF16, CHANNEL, BLOCK };

struct FewArguments {
  uint16_t* out;            // gate-up: [pairs, rows] in the plan's order; down: [tokens, rows]
  const uint16_t* x;        // gate-up: [tokens, ld_x]; down: [pairs, columns]
  const float* scale;       // of channels [experts, (2 ·) rows] or blocks, as `ExpertWeights` has them
  const uint16_t* bias;     // [experts, (2 ·) rows], or null
  const int* order;         // [pairs]
  const int* tiles;         // [num_tiles, 3]
  const int* ids;           // [tokens, top_k]
  const float* weights;     // [tokens, top_k]
  const uint16_t* shared;   // [tokens, ld_shared], or null
  const uint16_t* shared_gate;  // [tokens], or null
  float limit, slope;       // of the clamped activation
  int clamped, tokens, top_k, num_tiles;
  int rows, columns;        // of an expert's weight; rows of gate or up alone
  int tile_rows;            // of a stage: 8 of gate and of up, or up to 16 of down
  int ld_x, ld_shared;
  int room;                 // tokens of an expert that sums have room for: 8 or 16
};

template <FewKind kind, bool gated>
struct FewExperts {
  static constexpr int BYTES = kind == FewKind::BF16 ? 2 : 1;
  static constexpr int BOX_COLUMNS = 128 / BYTES, BOXES = FEW_COLUMNS / BOX_COLUMNS;
  static constexpr int STAGE_BYTES = BOXES * FEW_BOX_BYTES, STAGES = FEW_RING_BYTES / STAGE_BYTES;
  static constexpr bool quantized = kind != FewKind::BF16;

  const FewArguments& a;
  const CUtensorMap& map;
  unsigned char* const ring;
  // Of the shared memory behind the ring.
  int4* list;        // expert, first position, tokens
  int* count;        // of the list
  int* order;
  float* x_scale;
  unsigned char* x;
  float* parts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane / 4, c = lane % 4;

  __device__ __forceinline__ FewExperts(const FewArguments& arguments, const CUtensorMap& tensor_map, unsigned char* base)
      : a(arguments), map(tensor_map), ring(base) {
    unsigned char* at = base + FEW_RING_BYTES;
    count = reinterpret_cast<int*>(at + FEW_BARRIER_BYTES - 4);
    list = reinterpret_cast<int4*>(at + FEW_BARRIER_BYTES);
    order = reinterpret_cast<int*>(list + pairs());
    x_scale = reinterpret_cast<float*>(order + (pairs() + 3) / 4 * 4);
    x = reinterpret_cast<unsigned char*>(x_scale + (x_rows() + 3) / 4 * 4);
    parts = reinterpret_cast<float*>(x + x_rows() * pitch());
  }

  __device__ __forceinline__ int pairs() const { return a.tokens * a.top_k; }
  __device__ __forceinline__ int x_rows() const { return gated ? a.tokens : pairs(); }
  __device__ __forceinline__ int chunks() const { return (a.columns + FEW_COLUMNS - 1) / FEW_COLUMNS; }
  // Rows of x are 16 bytes apart modulo 128, so that neighbours lie in other banks.
  __device__ __forceinline__ int pitch() const { return chunks() * FEW_COLUMNS * 2 + 16; }
  __device__ __forceinline__ int row_tiles() const { return (a.rows + a.tile_rows - 1) / a.tile_rows; }
  __device__ __forceinline__ uint32_t full(int stage) const { return shared_address(ring + FEW_RING_BYTES) + 8 * stage; }

  // ---- what there is to do -----------------------------------------------------------------------------------------

  int first_job, jobs, per_job;

  // The experts that have tokens, by warp 0.
  __device__ __forceinline__ void find_experts() {
    int found = 0;
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
    if (lane == 0) *count = found;
    __syncwarp();
  }

  __device__ __forceinline__ void share_out() {
    const int all = gated ? *count * row_tiles() : row_tiles(), ctas = static_cast<int>(gridDim.x);
    const int cta = static_cast<int>(blockIdx.x);
    first_job = cta * all / ctas;
    jobs = (cta + 1) * all / ctas - first_job;
    per_job = gated ? chunks() : *count * chunks();
  }

  struct Place {
    int expert, row_tile, chunk;  // `expert` is an index in the list
  };
  __device__ __forceinline__ Place place(int item) const {
    const int job = first_job + item / per_job, within = item % per_job;
    if (gated) return {job / row_tiles(), job % row_tiles(), within};
    return {within / chunks(), job, within % chunks()};
  }
  __device__ __forceinline__ int boxes(int chunk) const {
    return min(BOXES, (a.columns - chunk * FEW_COLUMNS + BOX_COLUMNS - 1) / BOX_COLUMNS);
  }

  __device__ __forceinline__ void ask_for(int item, uint64_t policy) const {
    const Place at = place(item);
    const int stage = item % STAGES, expert = list[at.expert].x, wanted = boxes(at.chunk);
    const uint32_t to = shared_address(ring) + stage * STAGE_BYTES;
    mbarrier_arrive_expect(full(stage), wanted * 128 * (gated ? FEW_ROWS : a.tile_rows));
    for (int box = 0; box < wanted; ++box) {
      const int column = at.chunk * FEW_COLUMNS + box * BOX_COLUMNS;
      if (gated) {
        tensor_load_4d(to + box * FEW_BOX_BYTES, &map, column, 0, 0, expert * (a.rows / 4) + at.row_tile, full(stage), policy);
      } else {
        tensor_load_2d(to + box * FEW_BOX_BYTES, &map, column, expert * a.rows + at.row_tile * a.tile_rows, full(stage), policy);
      }
    }
  }

  // ---- rows of x ---------------------------------------------------------------------------------------------------

  // A warp takes a row: 16 bits as they are, or rounded to e4m3 with a scale a row, as f16, which holds them all.
  __device__ __forceinline__ void bring_rows() const {
    const int vectors = chunks() * (FEW_COLUMNS / 8);
    for (int row = (warp + FEW_WARPS - 1) % FEW_WARPS; row < x_rows(); row += FEW_WARPS) {
      const uint16_t* from = a.x + static_cast<int64_t>(row) * a.ld_x;
      int4* to = reinterpret_cast<int4*>(x + row * pitch());
      float greatest = 0.0f;
#pragma unroll 4
      for (int v = lane; v < vectors; v += 32) {
        const int4 some = v * 8 < a.columns ? load_int4(reinterpret_cast<const int*>(from + v * 8)) : make_int4(0, 0, 0, 0);
        to[v] = some;
        if (quantized) greatest = fmaxf(greatest, fmaxf(fmaxf(larger(some.x), larger(some.y)), fmaxf(larger(some.z), larger(some.w))));
      }
      if (quantized) {
        for (int mask = 16; mask > 0; mask /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, mask));
        const float scale = fmaxf(greatest * FEW_E4M3_UNIT, FEW_LEAST_SCALE), unit = 1.0f / scale;
        if (lane == 0) x_scale[row] = scale;
#pragma unroll 1
        for (int v = lane; v < vectors; v += 32) {
          const int4 some = to[v];
          to[v] = make_int4(rounded(some.x, unit), rounded(some.y, unit), rounded(some.z, unit), rounded(some.w, unit));
        }
      }
    }
  }
  static __device__ __forceinline__ float larger(int pair) {
    return fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair)));
  }
  static __device__ __forceinline__ int rounded(int pair, float unit) {
    uint32_t low, high;
    unpack_e4m3(e4m3_pair(bf16_low(pair) * unit, bf16_high(pair) * unit), low, high);
    return static_cast<int>(low);
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  // Sums of a stage: rows q and q + 8 of the weight with tokens 2c and 2c + 1 of eight. `row`: of the token q, or null.
  // A lane's columns of a box are 32 bytes that follow each other, so that a quarter of a warp reads every bank once.
  __device__ __forceinline__ void multiply(const unsigned char* stage, int wanted, const unsigned char* row,
                                           const float (&scales)[2][2], float (&sums)[4]) const {
    float other[4] = {};
#pragma unroll 1
    for (int box = 0; box < wanted; ++box, stage += FEW_BOX_BYTES) {
      float d[2][4] = {};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const unsigned char* weights = stage + q * 128 + ((2 * c + s) ^ q) * 16;
        const uint4 low = *reinterpret_cast<const uint4*>(weights), high = *reinterpret_cast<const uint4*>(weights + 1024);
        const unsigned char* tokens = row + (box * BOX_COLUMNS + (2 * c + s) * (16 / BYTES)) * 2;
        multiply_16_bytes(low, high, tokens, row != nullptr, quantized ? d[s] : s == 0 ? sums : other);
      }
      if (quantized) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float both = d[0][i] + d[1][i];
          sums[i] += kind == FewKind::BLOCK ? both * (box == 0 ? scales[i / 2][0] : scales[i / 2][1]) : both;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += other[i];
  }

  static __device__ __forceinline__ void multiply_16_bytes(uint4 low, uint4 high, const unsigned char* tokens, bool there,
                                                           float (&d)[4]) {
    const uint4 none = make_uint4(0, 0, 0, 0);
    const uint4 b = there ? *reinterpret_cast<const uint4*>(tokens) : none;
    if (!quantized) {
      mma_m16n8k16_bf16(d, {low.x, high.x, low.y, high.y}, b.x, b.y);
      mma_m16n8k16_bf16(d, {low.z, high.z, low.w, high.w}, b.z, b.w);
      return;
    }
    const uint4 more = there ? *reinterpret_cast<const uint4*>(tokens + 16) : none;
    multiply_word(low.x, high.x, b.x, b.y, d);
    multiply_word(low.y, high.y, b.z, b.w, d);
    multiply_word(low.z, high.z, more.x, more.y, d);
    multiply_word(low.w, high.w, more.z, more.w, d);
  }
  static __device__ __forceinline__ void multiply_word(uint32_t low, uint32_t high, uint32_t b0, uint32_t b1, float (&d)[4]) {
    uint32_t l0, l1, h0, h1;
    unpack_e4m3(low, l0, l1);
    unpack_e4m3(high, h0, h1);
    mma_m16n8k16_f16(d, {l0, h0, l1, h1}, b0, b1);
  }

  // The row of x of an expert's n-th token.
  __device__ __forceinline__ int row_of(int position) const { return gated ? order[position] / a.top_k : position; }

  // Where the sums of 16 rows lie: of a token of the job's expert, or of a pair.
  __device__ __forceinline__ float* sums_of(int job, int chunk, int n, int position) const {
    if (gated) return parts + ((((job & 1) * chunks() + chunk) * a.room) + n) * FEW_PITCH;
    return parts + (order[position] * chunks() + chunk) * FEW_PITCH;
  }

  __device__ __forceinline__ void run_item(int item, int job, uint64_t policy, int total) const {
    const Place at = place(item);
    const int4 expert = list[at.expert];
    const int stage = item % STAGES, wanted = boxes(at.chunk);
    float scales[2][2] = {};
    if (kind == FewKind::BLOCK) load_block_scales(at, expert.x, wanted, scales);
    mbarrier_wait(full(stage), item / STAGES & 1);
    for (int n0 = 0; n0 < expert.z; n0 += 8) {
      float sums[4] = {};
      const unsigned char* row = nullptr;
      if (n0 + q < expert.z) row = x + row_of(expert.y + n0 + q) * pitch() + at.chunk * FEW_COLUMNS * 2;
      multiply(ring + stage * STAGE_BYTES, wanted, row, scales, sums);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = n0 + 2 * c + i, position = expert.y + n;
        if (n >= expert.z) continue;
        const float unit = quantized ? x_scale[row_of(position)] : 1.0f;
        float* to = sums_of(job, at.chunk, n, position) + q;
        to[0] = sums[i] * unit;
        to[8] = sums[i + 2] * unit;
      }
    }
    __syncwarp();
    if (lane == 0 && item + STAGES < total) ask_for(item + STAGES, policy);
  }

  // Of the lane's two rows and a stage's blocks of 128 columns.
  __device__ __forceinline__ void load_block_scales(const Place& at, int expert, int wanted, float (&scales)[2][2]) const {
    const int wide = (a.columns + 127) / 128, high = (a.rows + 127) / 128;
    const int row = at.row_tile * a.tile_rows;
    const int low_block = gated ? expert * 2 * high + row / 128 : expert * high + min(row + q, a.rows - 1) / 128;
    const int high_block = gated ? low_block + high : expert * high + min(row + q + 8, a.rows - 1) / 128;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      if (box >= wanted) continue;
      scales[0][box] = a.scale[static_cast<int64_t>(low_block) * wide + at.chunk * 2 + box];
      scales[1][box] = a.scale[static_cast<int64_t>(high_block) * wide + at.chunk * 2 + box];
    }
  }

  // ---- what becomes of sums ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void finish(int job) const {
    if (gated) {
      activate(job);
    } else {
      add_choices(job);
    }
  }

  static __device__ __forceinline__ float from_bf16_bits(uint16_t bits) { return bf16_low(bits); }
  static __device__ __forceinline__ uint16_t to_bf16_bits(float x) { return static_cast<uint16_t>(pack_bf16(x, 0.0f)); }

  // A sum over all columns, with the row's scale and bias; `row` counts the rows of all experts.
  __device__ __forceinline__ float whole(const float* sums, int apart, int64_t row) const {
    float total = 0.0f;
    for (int chunk = 0; chunk < chunks(); ++chunk) total += sums[chunk * apart];
    if (kind == FewKind::CHANNEL) total *= a.scale[row];
    if (a.bias != nullptr) total += from_bf16_bits(a.bias[row]);
    return total;
  }

  __device__ __forceinline__ void activate(int job) const {
    const int4 expert = list[job / row_tiles()];
    const int n = threadIdx.x / 8, row = job % row_tiles() * 8 + threadIdx.x % 8;
    if (n >= expert.z || row >= a.rows) return;
    const float* sums = sums_of(job, 0, n, 0) + threadIdx.x % 8;
    const int64_t stacked = static_cast<int64_t>(expert.x) * 2 * a.rows + row;
    float gate = whole(sums, a.room * FEW_PITCH, stacked), up = whole(sums + 8, a.room * FEW_PITCH, stacked + a.rows);
    if (a.clamped) {
      gate = fminf(gate, a.limit);
      up = fminf(fmaxf(up, -a.limit), a.limit) + 1.0f;
    }
    const float result = up * __fdividef(gate, 1.0f + __expf(-a.slope * gate));
    a.out[static_cast<int64_t>(expert.y + n) * a.rows + row] = to_bf16_bits(result);
  }

  __device__ __forceinline__ void add_choices(int job) const {
    for (int i = threadIdx.x; i < a.tokens * a.tile_rows; i += FEW_THREADS) {
      const int token = i / a.tile_rows, within = i % a.tile_rows, row = job * a.tile_rows + within;
      if (row >= a.rows) continue;
      float total = 0.0f;
      for (int pair = token * a.top_k; pair < (token + 1) * a.top_k; ++pair) {
        const int expert = load_int(a.ids + pair);
        if (expert < 0) continue;
        const float given = whole(parts + pair * chunks() * FEW_PITCH + within, FEW_PITCH, static_cast<int64_t>(expert) * a.rows + row);
        total += a.weights[pair] * from_bf16_bits(to_bf16_bits(given));
      }
      if (a.shared != nullptr) {
        float beside = from_bf16_bits(a.shared[static_cast<int64_t>(token) * a.ld_shared + row]);
        if (a.shared_gate != nullptr) beside = __fdividef(beside, 1.0f + __expf(-from_bf16_bits(a.shared_gate[token])));
        total += beside;
      }
      a.out[static_cast<int64_t>(token) * a.rows + row] = to_bf16_bits(total);
    }
  }

  // ---- the whole ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void fill(uint64_t policy) {
    find_experts();
    share_out();
    for (int item = lane; item < min(STAGES, jobs * per_job); item += 32) ask_for(item, policy);
  }

  __device__ __forceinline__ void run() {
    const uint64_t policy = policy_evict_first();
    if (!gated) launch_dependents();
    if (threadIdx.x == 0) {
      tensor_map_prefetch(&map);
      for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(full(stage), 1);
      mbarrier_init_fence();
    }
    if (gated) {
      grid_dependency_wait();
      launch_dependents();
    }
    __syncwarp();
    if (warp == 0) fill(policy);
    if (warp == 1) {
      for (int i = lane; i < pairs(); i += 32) order[i] = load_int(a.order + i);
    }
    if (!gated) grid_dependency_wait();
    bring_rows();
    __syncthreads();
    share_out();
    for (int job = 0; job < jobs; ++job) {
      const int begin = job * per_job;
      for (int item = begin + ((warp - begin) & (FEW_WARPS - 1)); item < begin + per_job; item += FEW_WARPS) {
        run_item(item, first_job + job, policy, jobs * per_job);
      }
      __syncthreads();
      finish(first_job + job);
      if (!gated) __syncthreads();  // of gate-up the next job's sums lie elsewhere
    }
  }
};

template <FewKind kind, bool gated>
__device__ __forceinline__ void sm90_few_experts(const CUtensorMap& map, const FewArguments& a) {
  extern __shared__ unsigned char raw[];
  unsigned char* base = raw + (-shared_address(raw) & 1023);
  FewExperts<kind, gated>(a, map, base).run();
}

}  // namespace stoker

#define STOKER_SM90_FEW_EXPERTS(name, kind, gated)                                                               \
  extern "C" __global__ void __launch_bounds__(stoker::FEW_THREADS)                                              \
      name(const __grid_constant__ CUtensorMap map, const __grid_constant__ stoker::FewArguments a) {            \
    stoker::sm90_few_experts<stoker::FewKind::kind, gated>(map, a);                                              \
  }
