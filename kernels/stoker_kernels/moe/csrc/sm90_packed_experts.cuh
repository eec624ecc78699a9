// Experts' products for few tokens with weights in four bits, gate and up with their activation, and down with the weighted
// sum: what decodes is bound by its instructions and by how long a warp waits, not by what a ring of bytes in flight brings.
//
// A job is 16 rows of an expert, of gate-up eight of gate and of up. A warp takes it, or, where warps outnumber jobs, a part
// of its columns. It reads codes from memory into registers, 128 columns ahead, makes bf16 of them and multiplies by
// mma.sync, weights as A, the expert's tokens as B, and parts are added up in their order. Rows of x lie in shared memory in
// the order of codes in words: the eight numbers of a word follow each other, and so do those of the four lanes that multiply
// with them at once.
// The expert's rows are asked for by a few bulk prefetches to L2, whole jobs each, as soon as it is known who is chosen: by
// gate-up its own and, behind them, down's. Scales of a job are copied to shared memory before it.
//
// What the router wrote is settled for down, and code is rehearsed, as in sm90_few_experts.cuh. A choice by every CTA, as
// there, was no faster than the router's kernel.
#pragma once
#include "few_plan.cuh"
#include "packed_codes.cuh"

namespace stoker {

template <PackedKind kind, bool gated>
struct PackedExperts : FewPlan<gated, false> {
  using Layout = PackedLayout<kind>;
  using Codes = typename Layout::Codes;
  using Plan = FewPlan<gated, false>;
  using Plan::a, Plan::pairs, Plan::list, Plan::order, Plan::work, Plan::warp, Plan::lane, Plan::q, Plan::c;

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

  // Of gate-up by eight columns a thread, which has asked for two by then; those of down lie as they are read.
  __device__ __forceinline__ void bring_rows(int count) const {
    const int eights = gated ? a.columns / 8 : a.boxes * 32, all = count * eights;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += (gated ? 2 : 1) * FEW_THREADS) {
      const int other = i + FEW_THREADS;
      if (!gated) {
        const int row = i / eights, at = i - row * eights;
        copy_async_16(x + row * pitch + at * 16, a.x + static_cast<int64_t>(row) * a.ld_x + at * 8, true);
        continue;
      }
      const int4 some = load_int4(eight_at(i, eights)), more = other < all ? load_int4(eight_at(other, eights)) : int4{};
      spread(i, eights, some);
      if (other < all) spread(other, eights, more);
    }
    if (!gated) copies_wait();
  }
  __device__ __forceinline__ const int* eight_at(int i, int eights) const {
    const int row = i / eights;
    return reinterpret_cast<const int*>(a.x + static_cast<int64_t>(row) * a.ld_x + (i - row * eights) * 8);
  }

  // Eight columns that follow each other are one code place of as many words, or two of half as many.
  __device__ __forceinline__ void spread(int i, int eights, const int4& values) const {
    const int row = i / eights, column = (i - row * eights) * 8;
    const uint32_t pairs[4] = {static_cast<uint32_t>(values.x), static_cast<uint32_t>(values.y),
                               static_cast<uint32_t>(values.z), static_cast<uint32_t>(values.w)};
    const PackedStep step = packed_step<Layout::STEP_WORDS>(column / 8, a.columns);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint16_t* to = reinterpret_cast<uint16_t*>(x + row * pitch) + place_of(step, column + j);
      *to = static_cast<uint16_t>(pairs[j / 2] >> j % 2 * 16);
    }
  }

  // Where a row of x, or of what down reads, has a column of this step: the eight numbers of a word follow each other, and
  // the words 4c to 4c + 3 of 16 are those of lane c of four, one a turn.
  static __device__ __forceinline__ int place_of(const PackedStep& step, int column) {
    const int within = column - step.column, place = within >> (31 - __clz(step.words));
    const int word = (within & (step.words - 1)) + step.column / 8;
    return word / 16 * 128 + (word % 4 * 4 + word / 4 % 4) * 8 + place;
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  // Sums of the `part`-th of `parts` parts of a job's columns: rows q and q + 8 of the weight with tokens 2c and 2c + 1 of
  // eight. `row`: of x, of the token q, or null. In a rehearsal of half a box.
  __device__ __forceinline__ void multiply(int64_t weight_row, int part, int parts, const unsigned char* row, bool real,
                                           float (&sums)[4]) const {
    const int first = 2 * (part * a.boxes / parts), last = real ? 2 * ((part + 1) * a.boxes / parts) : first + 1;
    const int row_bytes = a.columns / 2;
    const unsigned char* low = p.weight + (weight_row + q) * row_bytes + c * 16;
    const unsigned char* high = low + static_cast<int64_t>(apart()) * row_bytes;
    float other[4] = {};
    uint4 next[2];
    load_half_box(low, high, first, next);
    copies_wait();  // the scales
    __syncwarp();
    PackedStep step = packed_step<Layout::STEP_WORDS>(first * 16 + 4 * c, a.columns);
    Codes gate(step, p.group_shift, [&](int line) { return scales_at(line, 0); });
    Codes up(step, p.group_shift, [&](int line) { return scales_at(line, 1); });
#pragma unroll 1
    for (int half = first; half < last; ++half) {
      const uint4 upper = next[0], lower = next[1];
      if (half + 1 < last) load_half_box(low, high, half + 1, next);
      const bool there = row != nullptr && half * 128 + c * 32 < a.columns;
      const unsigned char* tokens = there ? row + half * 256 + c * 16 : nullptr;
      multiply_word(gate, up, upper.x, lower.x, tokens, 0, sums, other);
      multiply_word(gate, up, upper.y, lower.y, tokens, 64, sums, other);
      multiply_word(gate, up, upper.z, lower.z, tokens, 128, sums, other);
      multiply_word(gate, up, upper.w, lower.w, tokens, 192, sums, other);
      if (Layout::STEP_WORDS == 16 || half % 2 || (half + 1) * 128 >= a.columns / PACKED_BOX * PACKED_BOX) {
        step = packed_step<Layout::STEP_WORDS>(half * 16 + 16 + 4 * c, a.columns);
        gate = Codes(step, p.group_shift, [&](int line) { return scales_at(line, 0); });
        up = Codes(step, p.group_shift, [&](int line) { return scales_at(line, 1); });
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = (sums[i] + other[i]) * Layout::UNIT;
  }

  __device__ __forceinline__ const unsigned char* scales_at(int line, int half) const {
    return scales + ((line * 2 + half) * 8 + q) * Codes::SCALE_BYTES;
  }

  // A lane's words of half a box of rows q and q + 8, four of each; those behind the row's end are zero.
  __device__ __forceinline__ void load_half_box(const unsigned char* low, const unsigned char* high, int half,
                                                uint4 (&words)[2]) const {
    words[0] = words[1] = make_uint4(0, 0, 0, 0);
    if (half * 128 + c * 32 < a.columns) words[0] = words_at(low + half * 64), words[1] = words_at(high + half * 64);
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
      } else if (real) {
        bring_scales_of(warp);
      }
      bring_rows(real ? x_rows : 1);
      if (!gated || real) __syncthreads();
      if (gated) {
        open_jobs(real);
      } else {
        close_jobs(real);
      }
    }
  }

  // Of gate-up, a warp a part of a job's columns, and then all together what they made. In a rehearsal half a box, of the
  // first expert and the same for all.
  __device__ __forceinline__ void open_jobs(bool real) const {
    const int4 mine = *work;
    const int jobs = real ? mine.w : 1, at_once = FEW_WARPS / a.chunks;
#pragma unroll 1
    for (int base = 0; base < jobs; base += at_once) {
      const int job = real ? base + warp / a.chunks : 0;
      if (job < jobs) {
        const int tile = mine.z + job, row_tile = tile % a.row_tiles;
        const int4 expert = list[mine.y + tile / a.row_tiles];
        bring_scales(expert.x, row_tile);
        float sums[4] = {};
        multiply(first_row(expert.x, row_tile), warp % a.chunks, a.chunks,
                 q < expert.z ? x + order[expert.y + q] * pitch : nullptr, real, sums);
        keep(expert.z, sums, [&](int n) { return warp * a.tokens + n; });
      }
      __syncthreads();
      activate(base, min(jobs - base, at_once), real);
      __syncthreads();
    }
  }

  // A lane's sums of its two rows and of tokens n, each in the place among all that `place` says.
  template <typename Place>
  __device__ __forceinline__ void keep(int tokens, const float (&sums)[4], const Place& place) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = 2 * c + i;
      if (n >= tokens) continue;
      float* to = parts + place(n) * FEW_PITCH + q;
      to[0] = sums[i], to[8] = sums[i + 2];
    }
  }

  // Of jobs that are together in shared memory: a thread a token and row.
  __device__ __forceinline__ void activate(int base, int jobs, bool real) const {
    const int4 mine = *work;
#pragma unroll 1
    for (int i = threadIdx.x; i < jobs * a.tokens * 8; i += FEW_THREADS) {
      const int within = i % 8, n = i / 8 % a.tokens, job = i / 8 / a.tokens;
      const int tile = mine.z + base + job, row = tile % a.row_tiles * 8 + within;
      const int4 expert = list[mine.y + tile / a.row_tiles];
      if (n >= expert.z) continue;
      float gate = 0.0f, up = 0.0f;
#pragma unroll 1
      for (int part = 0; part < a.chunks; ++part) {
        const float* sums = parts + ((job * a.chunks + part) * a.tokens + n) * FEW_PITCH + within;
        gate += sums[0], up += sums[8];
      }
      const int64_t stacked = static_cast<int64_t>(expert.x) * 2 * a.rows + row;
      const float result = Plan::opened(settled(gate, stacked), settled(up, stacked + a.rows));
      const int place = place_of(packed_step<Layout::STEP_WORDS>(row / 8, a.rows), row);
      if (real) a.out[static_cast<int64_t>(expert.y + n) * p.ld_out + place] = Plan::bf16_bits(result);
    }
  }

  // Of down: an item is a part of the columns of an expert.
  __device__ __forceinline__ void bring_scales_of(int item) const {
    const int4 mine = *work;
    if (item < mine.x * a.chunks && mine.w > 0) bring_scales(list[item / a.chunks].x, mine.z);
  }

  // Of down, 16 rows after the other: a warp an item, then all choices together. The first item's scales are on their way.
  __device__ __forceinline__ void close_jobs(bool real) const {
    const int4 mine = *work;
    const int tiles = real ? mine.w : min(mine.w, 1), items = real ? mine.x * a.chunks : min(mine.x, 1);
#pragma unroll 1
    for (int tile = mine.z; tile < mine.z + tiles; ++tile) {
#pragma unroll 1
      for (int item = real ? warp : 0; item < items; item += FEW_WARPS) {
        const int part = item % a.chunks;
        const int4 expert = list[item / a.chunks];
        if (!real || tile > mine.z || item >= FEW_WARPS) bring_scales(expert.x, tile);
        float sums[4] = {};
        multiply(first_row(expert.x, tile), part, a.chunks, q < expert.z ? x + (expert.y + q) * pitch : nullptr, real, sums);
        keep(expert.z, sums, [&](int n) { return order[expert.y + n] * a.chunks + part; });  // a pair's follow each other
        __syncwarp();
        if (!real) break;
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
  extern "C" __global__ void __launch_bounds__(stoker::FEW_THREADS, 3)                  \
      name(const __grid_constant__ stoker::PackedArguments a) {                         \
    stoker::sm90_packed_experts<stoker::PackedKind::kind, gated>(a);                    \
  }
