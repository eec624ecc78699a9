// Experts' products for few tokens with weights in four bits, gate and up with their activation, and down with the weighted
// sum: what decodes is bound by its instructions and by how long a warp waits, not by what a ring of bytes in flight brings.
//
// A warp takes a job, 16 rows of an expert and all their columns (of gate-up eight rows of gate and of up), or a part of
// the columns of down. It reads codes from memory into registers, 256 columns ahead, makes bf16 of them and multiplies by
// mma.sync, weights as A, the expert's tokens as B. Rows of x lie in shared memory in the order of codes in words: the eight
// numbers of a word follow each other, and so do those of the four lanes that multiply with them at once.
// The expert's rows are asked for by a few bulk prefetches to L2, whole jobs each, as soon as it is known who is chosen: by
// gate-up its own and, behind them, down's. Scales of a job are copied to shared memory before it.
//
// Who is chosen, and the rehearsal before that: as in sm90_few_experts.cuh.
#pragma once
#include "few_plan.cuh"
#include "packed_codes.cuh"

namespace stoker {

template <PackedKind kind, bool gated>
struct PackedExperts : FewPlan<gated> {
  using Layout = PackedLayout<kind>;
  using Codes = typename Layout::Codes;
  using Plan = FewPlan<gated>;
  using Plan::a, Plan::pairs, Plan::list, Plan::order, Plan::ids, Plan::work, Plan::warp, Plan::lane, Plan::q, Plan::c;

  const PackedArguments& p;
  const int x_rows, pitch;  // bytes of a row of x, which begins in other banks than its neighbours
  unsigned char* const x;
  unsigned char* const scales;  // of this warp's job
  float* const parts;

  __device__ __forceinline__ PackedExperts(const PackedArguments& arguments, unsigned char* base)
      : Plan(arguments.few, reinterpret_cast<int4*>(base), base + 16),
        p(arguments),
        x_rows(gated ? a.tokens : pairs),
        pitch(a.boxes * PACKED_BOX * 2 + 64),
        x(reinterpret_cast<unsigned char*>(Plan::end())),
        scales(x + x_rows * pitch + warp * scale_room()),
        parts(reinterpret_cast<float*>(x + x_rows * pitch + FEW_WARPS * scale_room())) {}

  __device__ __forceinline__ int scale_room() const { return p.lines * PACKED_TILE * Codes::SCALE_BYTES; }

  // ---- where things are --------------------------------------------------------------------------------------------

  // A job's first row, of gate-up of gate, counted through all experts; and how many further down its other eight are.
  __device__ __forceinline__ int64_t first_row(int expert, int row_tile) const {
    return gated ? static_cast<int64_t>(expert) * 2 * a.rows + row_tile * 8
                 : static_cast<int64_t>(expert) * a.rows + row_tile * PACKED_TILE;
  }
  __device__ __forceinline__ int apart() const { return gated ? a.rows : 8; }

  // To L2: the rows of every job of this CTA, a lane a job, and of gate-up down's, 16 rows a lane and turn.
  __device__ __forceinline__ void ask_for_rows() const {
    const int4 mine = *work;
    const int row_bytes = a.columns / 2;
#pragma unroll 1
    for (int job = lane; job < mine.w; job += 32) {
      const int tile = mine.z + job, expert = list[mine.y + tile / a.row_tiles].x;
      const unsigned char* gate = p.weight + first_row(expert, tile % a.row_tiles) * row_bytes;
      prefetch_l2(gate, 8 * row_bytes);
      prefetch_l2(gate + static_cast<int64_t>(apart()) * row_bytes, 8 * row_bytes);
    }
    const int next_bytes = PACKED_TILE * a.rows / 2, tiles = p.next_rows / PACKED_TILE;
    const unsigned all = mine.x * tiles, last = (blockIdx.x + 1) * all / gridDim.x;
#pragma unroll 1
    for (unsigned i = blockIdx.x * all / gridDim.x + lane; i < last; i += 32) {
      prefetch_l2(p.next + (static_cast<int64_t>(list[i / tiles].x) * tiles + i % tiles) * next_bytes, next_bytes);
    }
  }

  // A job's scales: of each line eight rows' and those of the eight others, by 16 bytes a lane. Not waited for.
  __device__ __forceinline__ void bring_scales(int expert, int row_tile) const {
    constexpr int PIECES = Codes::SCALE_BYTES / 2;  // of eight rows
    const int64_t stacked = (gated ? 2 : 1) * a.rows;
    const unsigned char* from = p.scales + (expert * p.lines * stacked + (first_row(expert, row_tile) - expert * stacked)) *
                                               Codes::SCALE_BYTES;
#pragma unroll 1
    for (int i = lane; i < p.lines * 2 * PIECES; i += 32) {
      const int piece = i % PIECES, half = i / PIECES % 2, line = i / (2 * PIECES);
      copy_async_16(scales + i * 16, from + (line * stacked + half * apart()) * Codes::SCALE_BYTES + piece * 16, true);
    }
  }

  // ---- rows of x ---------------------------------------------------------------------------------------------------

  // A warp takes half a box of a row, 16 words, a lane four numbers of one.
  __device__ __forceinline__ void bring_rows(int count) const {
    const int halves = 2 * a.boxes, word = lane % 16, first = lane / 16 * 4;
#pragma unroll 2
    for (int i = warp; i < count * halves; i += FEW_WARPS) {
      const int row = i / halves, at = i % halves * 16 + word;
      const uint16_t* from = a.x + static_cast<int64_t>(row) * a.ld_x;
      uint2 pairs = make_uint2(0, 0);
      if (at * 8 < a.columns) {
        const PackedStep step = packed_step<Layout::STEP_WORDS>(at, a.columns);
        from += step.column + at - step.column / 8 + first * step.words;
        pairs.x = load_half(from) | static_cast<uint32_t>(load_half(from + step.words)) << 16;
        pairs.y = load_half(from + 2 * step.words) | static_cast<uint32_t>(load_half(from + 3 * step.words)) << 16;
      }
      // Words 4c to 4c + 3 are those of lane c of four, one a turn.
      *reinterpret_cast<uint2*>(x + row * pitch + i % halves * 256 + (word % 4 * 4 + word / 4) * 16 + first * 2) = pairs;
    }
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  // Sums of the boxes [first, last) of a job: rows q and q + 8 of the weight with tokens 2c and 2c + 1 of eight. `row`: of
  // the token q, or null.
  __device__ __forceinline__ void multiply(int64_t weight_row, int first, int last, const unsigned char* row,
                                           float (&sums)[4]) const {
    const int row_bytes = a.columns / 2;
    const unsigned char* low = p.weight + (weight_row + q) * row_bytes;
    const unsigned char* high = low + static_cast<int64_t>(apart()) * row_bytes;
    float other[4] = {};
    uint4 next[4];
    load_box(low, high, first, next);
#pragma unroll 1
    for (int box = first; box < last; ++box) {
      uint4 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = next[i];
      if (box + 1 < last) load_box(low, high, box + 1, next);
      const bool whole = Layout::STEP_WORDS == 32 && (box + 1) * PACKED_BOX <= a.columns;
      PackedStep step = packed_step<Layout::STEP_WORDS>(box * 32 + 4 * c, a.columns);
      Codes gate(step, p.group_shift, [&](int line) { return scales_at(line, 0); });
      Codes up(step, p.group_shift, [&](int line) { return scales_at(line, 1); });
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (s == 1 && !whole) {
          step = packed_step<Layout::STEP_WORDS>(box * 32 + 16 + 4 * c, a.columns);
          gate = Codes(step, p.group_shift, [&](int line) { return scales_at(line, 0); });
          up = Codes(step, p.group_shift, [&](int line) { return scales_at(line, 1); });
        }
        const unsigned char* tokens = row == nullptr ? nullptr : row + box * 512 + s * 256 + c * 16;
        multiply_word(gate, up, words[s].x, words[2 + s].x, tokens, 0, sums, other);
        multiply_word(gate, up, words[s].y, words[2 + s].y, tokens, 64, sums, other);
        multiply_word(gate, up, words[s].z, words[2 + s].z, tokens, 128, sums, other);
        multiply_word(gate, up, words[s].w, words[2 + s].w, tokens, 192, sums, other);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = (sums[i] + other[i]) * Layout::UNIT;
  }

  __device__ __forceinline__ const unsigned char* scales_at(int line, int half) const {
    return scales + ((line * 2 + half) * 8 + q) * Codes::SCALE_BYTES;
  }

  // A lane's words of a box, four of each half of rows q and q + 8; those behind the row's end are zero.
  __device__ __forceinline__ void load_box(const unsigned char* low, const unsigned char* high, int box,
                                           uint4 (&words)[4]) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int at = box * (PACKED_BOX / 2) + s * 64 + c * 16;
      words[s] = words[2 + s] = make_uint4(0, 0, 0, 0);
      if (at < a.columns / 2) words[s] = words_at(low + at), words[2 + s] = words_at(high + at);
    }
  }
  static __device__ __forceinline__ uint4 words_at(const unsigned char* at) {
    const int4 v = load_int4(reinterpret_cast<const int*>(at));
    return make_uint4(v.x, v.y, v.z, v.w);
  }

  static __device__ __forceinline__ void multiply_word(const Codes& low, const Codes& high, uint32_t upper, uint32_t lower,
                                                       const unsigned char* tokens, int offset, float (&even)[4],
                                                       float (&odd)[4]) {
    uint4 b = make_uint4(0, 0, 0, 0);
    if (tokens != nullptr) b = *reinterpret_cast<const uint4*>(tokens + offset);
    uint32_t first[4], second[4];
    low.unpack(upper, first);
    high.unpack(lower, second);
    mma_m16n8k16_bf16(even, {first[0], second[0], first[1], second[1]}, b.x, b.y);
    mma_m16n8k16_bf16(odd, {first[2], second[2], first[3], second[3]}, b.z, b.w);
  }

  // A sum over all columns with the factor and the bias of a row, which counts those of all experts.
  __device__ __forceinline__ float settled(float total, int64_t row) const {
    if (kind == PackedKind::NVFP4) total *= p.factor[row];
    if (a.bias != nullptr) total += bf16_low(a.bias[row]);
    return total;
  }

  // ---- the whole ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() const {
    if (gated) {
      if (threadIdx.x == 0) Plan::pretend();
    } else {
      launch_dependents();
      Plan::read(true);
    }
    __syncthreads();
#pragma unroll 1
    for (int real = 0; real < 2; ++real) {
      if (real) {
        grid_dependency_wait();
        if (gated) launch_dependents();
      }
      if (gated) {
        Plan::read(real);
        if (warp == 0 && real) ask_for_rows();
      }
      bring_rows(real ? x_rows : 1);
      if (!gated || real) __syncthreads();
      if (gated) {
        open_jobs(real);
      } else {
        if (real && a.counts != nullptr && blockIdx.x == 0) Plan::count();
        close_jobs(real);
      }
    }
  }

  // Of gate-up, job by job a warp. In a rehearsal one box, of the first expert and the same for all.
  __device__ __forceinline__ void open_jobs(bool real) const {
    const int4 mine = *work;
    const int jobs = real ? mine.w : 1;
#pragma unroll 1
    for (int job = real ? warp : 0; job < jobs; job += FEW_WARPS) {
      const int tile = mine.z + job, row_tile = tile % a.row_tiles;
      const int4 expert = list[mine.y + tile / a.row_tiles];
      const int64_t gate = first_row(expert.x, row_tile) + q, up = gate + a.rows;
      bring_scales(expert.x, row_tile);
      copies_wait();
      __syncwarp();
      float sums[4] = {};
      multiply(first_row(expert.x, row_tile), 0, real ? a.boxes : 1, q < expert.z ? x + order[expert.y + q] * pitch : nullptr,
               sums);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = 2 * c + i, position = expert.y + n;
        if (n >= expert.z) continue;
        const float result = Plan::opened(settled(sums[i], gate), settled(sums[i + 2], up));
        if (real) a.out[static_cast<int64_t>(position) * a.rows + row_tile * 8 + q] = Plan::bf16_bits(result);
      }
      __syncwarp();
    }
    __syncthreads();
  }

  // Of down, 16 rows after the other: a warp a part of an expert's columns, then all choices together.
  __device__ __forceinline__ void close_jobs(bool real) const {
    const int4 mine = *work;
    const int tiles = real ? mine.w : min(mine.w, 1), items = real ? mine.x * a.chunks : min(mine.x, 1);
#pragma unroll 1
    for (int tile = mine.z; tile < mine.z + tiles; ++tile) {
#pragma unroll 1
      for (int item = real ? warp : 0; item < items; item += FEW_WARPS) {
        const int part = item % a.chunks;
        const int4 expert = list[item / a.chunks];
        const int first = part * a.boxes / a.chunks, last = (part + 1) * a.boxes / a.chunks;
        bring_scales(expert.x, tile);
        copies_wait();
        __syncwarp();
        float sums[4] = {};
        multiply(first_row(expert.x, tile), first, real ? last : min(last, first + 1),
                 q < expert.z ? x + (expert.y + q) * pitch : nullptr, sums);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int n = 2 * c + i;
          if (n >= expert.z) continue;
          float* to = parts + (order[expert.y + n] * a.chunks + part) * FEW_PITCH + q;
          to[0] = sums[i], to[8] = sums[i + 2];
        }
        __syncwarp();
      }
      __syncthreads();
      Plan::add_choices(parts, tile, [&](float total, int64_t row) { return settled(total, row); }, real);
      __syncthreads();
    }
  }
};

template <PackedKind kind, bool gated>
__device__ __forceinline__ void sm90_packed_experts(const PackedArguments& a) {
  extern __shared__ unsigned char raw[];
  PackedExperts<kind, gated>(a, raw).run();
}

}  // namespace stoker

#define STOKER_SM90_PACKED_EXPERTS(name, kind, gated)                                   \
  extern "C" __global__ void __launch_bounds__(stoker::FEW_THREADS, 2)                  \
      name(const __grid_constant__ stoker::PackedArguments a) {                         \
    stoker::sm90_packed_experts<stoker::PackedKind::kind, gated>(a);                    \
  }
