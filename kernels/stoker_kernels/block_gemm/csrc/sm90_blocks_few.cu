// y = x · Wᵀ + bias for up to 32 tokens and weights in GGUF's planes, where the bytes of the weight are the limit.
//
// A CTA has some tiles of 16 rows. Its eight warps share the columns: each keeps x of one or two steps of 256 columns in
// registers and takes them of a tile after the other, its units coming by copies of its own into a ring of its own. What the warps found of a tile is added in their order. Where a row has more steps than the warps keep, they
// run through the tiles of a chunk again. Weights are requested before the kernel before is done.
#include "block_units.cuh"

namespace stoker {

struct BlockArguments {
  __nv_bfloat16* out;         // [m, ld_out]
  const __nv_bfloat16* x;     // [m, ld_x]
  const __nv_bfloat16* bias;  // [n] or null
  const unsigned char *low, *high;  // [n, steps, bytes of a row], the second null where there is none
  const unsigned char* scale;   // [steps, words of 8 bytes, n]
  const unsigned char* factor;  // [steps, n] of 4 bytes, or null
  int m, n, steps, ld_x, ld_out;
};

constexpr int BLOCK_WARPS = 8;

// Of up to 16 tokens two CTAs find room in an SM, so that the next launch's fill their rings beside ours; of 32 one.
template <int N_TILES>
struct FewTokens {
  static constexpr int TOKENS = 8 * N_TILES, CTAS = N_TILES > 2 ? 1 : 2, SLICES = N_TILES > 1 ? 1 : 2;
  static constexpr int SHARED_BYTES = (CTAS == 2 ? 113 : 227) * 1024, CHUNK_TILES = CTAS == 2 ? 8 : 16;
};

// Which unit comes next: chunks of tiles, passes of steps, tiles, and the steps that a warp keeps.
template <int N_TILES>
struct UnitCursor {
  static constexpr int SLICES = FewTokens<N_TILES>::SLICES, CHUNK_TILES = FewTokens<N_TILES>::CHUNK_TILES;
  int first, end, last;  // tiles of the chunk, and where the CTA's end
  int pass = 0, tile, slice = 0;

  __device__ __forceinline__ UnitCursor(int from, int to, bool idle)
      : first(from), end(min(from + CHUNK_TILES, to)), last(to), tile(idle ? to : from) {}
  __device__ __forceinline__ bool done() const { return tile >= last; }
  __device__ __forceinline__ int step(int warp) const { return (pass * SLICES + slice) * BLOCK_WARPS + warp; }
  __device__ __forceinline__ void next(int steps, int warp) {
    if (SLICES > 1 && ++slice < SLICES && step(warp) < steps) return;
    slice = 0;
    if (++tile < end) return;
    ++pass;
    tile = first;
    if (step(warp) < steps) return;
    pass = 0;
    tile = first = end;
    end = min(first + CHUNK_TILES, last);
  }
};

// The rings and the sums in shared memory.
template <class F, int N_TILES>
struct BlockShared {
  using T = FewTokens<N_TILES>;
  static constexpr int TOKENS = T::TOKENS, SUM_STRIDE = UNIT_ROWS + 4, WARP_SUMS = TOKENS * SUM_STRIDE;
  static constexpr int SUM_BYTES = 4 * TOKENS * (2 * BLOCK_WARPS * (UNIT_ROWS + 4) + T::CHUNK_TILES * UNIT_ROWS);
  static constexpr int STAGES = (T::SHARED_BYTES - SUM_BYTES) / (BLOCK_WARPS * F::UNIT_BYTES);  // of a warp's ring
  unsigned char* ring;
  float* sums;   // [2][warps][tokens][SUM_STRIDE], of tiles in turn
  float* whole;  // [tiles of a chunk][tokens][16], where there are several passes

  __device__ __forceinline__ BlockShared(unsigned char* raw, int warp) {
    sums = reinterpret_cast<float*>(raw);
    whole = sums + 2 * BLOCK_WARPS * WARP_SUMS;
    ring = raw + SUM_BYTES + warp * STAGES * F::UNIT_BYTES;
  }
};

// A lane's share of a unit's copies: of each 8 rows of 64 bytes or 4 of 128 one chunk of 16, and one of its scales.
template <class F>
struct UnitCopies {
  static constexpr int HIGH_ROW = F::HIGH_BYTES / UNIT_ROWS, LOW_LANES = 8, HIGH_LANES = F::CODES == SIX ? 4 : 8;
  const unsigned char *low, *high, *rest;
  uint32_t low_row, high_row, rest_step, rest_row;  // bytes to the next row of a plane, to the next step of scales
  uint32_t low_at, high_at, rest_at;                // where they go in a unit
  bool has_rest;

  __device__ __forceinline__ UnitCopies(const BlockArguments& p, int lane) {
    low_row = p.steps * 128, high_row = p.steps * HIGH_ROW;
    const int row = lane / LOW_LANES, chunk = lane % LOW_LANES;
    low = p.low + static_cast<int64_t>(row) * low_row + chunk * 16;
    low_at = row * 128 + (chunk ^ row) * 16;  // rows four further: the other half of the chunks
    const int upper = lane / HIGH_LANES, part = lane % HIGH_LANES;
    high = p.high + static_cast<int64_t>(upper) * high_row + part * 16;
    high_at = F::CODES == SIX ? upper * 64 + (part ^ upper / 2 % 4) * 16 : low_at;
    const int word = lane / 8;
    const bool factors = word >= F::SCALE_WORDS;
    rest = factors ? p.factor + lane % 8 * 16 : p.scale + static_cast<int64_t>(word) * p.n * 8 + lane % 8 * 16;
    rest_row = factors ? 4 : 8;
    rest_step = p.n * (factors ? 4 : 8 * F::SCALE_WORDS);
    rest_at = word * 128 + lane % 8 * 16;
    has_rest = rest_at < F::REST_BYTES;
  }
  __device__ __forceinline__ void send(uint32_t unit, int step, int tile, uint64_t policy) const {
    const int row = tile * UNIT_ROWS;
    const unsigned char* from = low + (static_cast<int64_t>(row) * low_row + step * 128);
#pragma unroll
    for (int i = 0; i < UNIT_ROWS / 4; i++) {
      copy_weight(unit + (low_at ^ i % 2 * 64) + i * 512, from + i * 4 * low_row, policy);
    }
    if constexpr (F::HIGH_BYTES > 0) {
      const unsigned char* above = high + (static_cast<int64_t>(row) * high_row + step * HIGH_ROW);
      constexpr int ROWS = 32 / HIGH_LANES;  // at a time
#pragma unroll
      for (int i = 0; i < UNIT_ROWS / ROWS; i++) {
        const uint32_t at = F::CODES == SIX ? high_at : high_at ^ i % 2 * 64;
        copy_weight(unit + F::LOW_BYTES + at + i * 512, above + i * ROWS * high_row, policy);
      }
    }
    if (has_rest) {
      const int64_t offset = static_cast<int64_t>(step) * rest_step + row * rest_row;
      copy_weight(unit + F::LOW_BYTES + F::HIGH_BYTES + rest_at, rest + offset, policy);
    }
  }
};

// What the warps found of a tile → the result, or what further passes add to.
template <class F, int N_TILES>
__device__ __forceinline__ void finish_tile(const BlockArguments& p, const BlockShared<F, N_TILES>& s, int turn, int tile,
                                            int of_chunk, bool first_pass, bool last_pass) {
  using S = BlockShared<F, N_TILES>;
  constexpr int RESULTS = S::TOKENS * UNIT_ROWS, THREADS = BLOCK_WARPS * 32;
  const int buffer = turn % 2, thread = threadIdx.x;
  if (RESULTS < THREADS && thread / RESULTS != buffer) return;  // halves of the CTA in turn
#pragma unroll
  for (int at = thread % RESULTS; at < RESULTS; at += THREADS) {
    const int token = at / UNIT_ROWS, row = at % UNIT_ROWS;
    const float* found = s.sums + buffer * BLOCK_WARPS * S::WARP_SUMS + token * S::SUM_STRIDE + row;
    float sum = found[0];
#pragma unroll
    for (int warp = 1; warp < BLOCK_WARPS; warp++) sum += found[warp * S::WARP_SUMS];
    float* whole = s.whole + of_chunk * RESULTS + at;
    if (!first_pass) sum += *whole;
    if (!last_pass) {
      *whole = sum;
    } else if (token < p.m) {
      const int column = tile * UNIT_ROWS + row;
      float value = sum * SUM_UNIT;
      if (p.bias != nullptr) value += __bfloat162float(p.bias[column]);
      const uint32_t rounded = pack_bf16(value, 0.f);
      uint16_t* out = reinterpret_cast<uint16_t*>(p.out) + static_cast<int64_t>(token) * p.ld_out + column;
      *out = static_cast<uint16_t>(rounded);
    }
  }
}

template <class F, int N_TILES>
__device__ __forceinline__ void blocks_few(const BlockArguments& p) {
  constexpr int SLICES = FewTokens<N_TILES>::SLICES, CHUNK_TILES = FewTokens<N_TILES>::CHUNK_TILES;
  using S = BlockShared<F, N_TILES>;
  extern __shared__ unsigned char raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = p.n / UNIT_ROWS;
  const S s(raw, warp);
  const int from = static_cast<int64_t>(blockIdx.x) * tiles / gridDim.x;
  const int to = static_cast<int64_t>(blockIdx.x + 1) * tiles / gridDim.x;
  const uint64_t policy = policy_evict_first();
  const UnitCopies<F> copies(p, lane);
  const uint32_t ring = shared_address(s.ring);
  // In a register, as the compiler cannot know it: an instruction has one constant.
  const uint32_t magic = p.m > 0 ? 0x4B000000u : 0u;
  UnitCursor<N_TILES> ahead(from, to, warp >= p.steps);
  const auto ask = [&](int stage) {
    if (!ahead.done()) {
      copies.send(ring + stage * F::UNIT_BYTES, ahead.step(warp), ahead.tile, policy);
      ahead.next(p.steps, warp);
    }
    copies_commit();
  };
#pragma unroll 1
  for (int i = 0; i < S::STAGES; i++) ask(i);
  launch_dependents();
  grid_dependency_wait();

  const int passes = (p.steps + BLOCK_WARPS * SLICES - 1) / (BLOCK_WARPS * SLICES);
  int stage = 0, turn = 0;
  for (int chunk = from; chunk < to; chunk += CHUNK_TILES) {
    for (int pass = 0; pass < passes; pass++) {
      BlockX<F, N_TILES> x[SLICES];
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        const int step = (pass * SLICES + slice) * BLOCK_WARPS + warp;
        if (step < p.steps) x[slice].read(p.x + step * UNIT_COLUMNS, p.ld_x, p.m, lane);
      }
#pragma unroll 1
      for (int tile = chunk; tile < min(chunk + CHUNK_TILES, to); tile++, turn++) {
        float total[N_TILES][4] = {};
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
          if ((pass * SLICES + slice) * BLOCK_WARPS + warp >= p.steps) break;
          copies_wait_group<S::STAGES - 1>();
          __syncwarp();
          const unsigned char* unit = s.ring + stage * F::UNIT_BYTES;
          multiply_unit<F, N_TILES>({unit, unit + F::LOW_BYTES, unit + F::LOW_BYTES + F::HIGH_BYTES}, x[slice], total, lane, magic, [&] {
            __syncwarp();
            ask(stage);
          });
          if (++stage == S::STAGES) stage = 0;
        }
        float* mine = s.sums + (turn % 2 * BLOCK_WARPS + warp) * S::WARP_SUMS + lane % 4 * 2 * S::SUM_STRIDE + lane_row(lane);
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) mine[(n * 8 + i % 2) * S::SUM_STRIDE + i / 2 * 8] = total[n][i];
        __syncthreads();
        finish_tile<F, N_TILES>(p, s, turn, tile, tile - chunk, pass == 0, pass + 1 == passes);
      }
    }
  }
}

}  // namespace stoker

#define FEW(FORMAT, N_TILES, TOKENS, NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, stoker::FewTokens<N_TILES>::CTAS)                             \
      sm90_blocks_few_##NAME##_m##TOKENS(const __grid_constant__ stoker::BlockArguments p) {                     \
    stoker::blocks_few<stoker::FORMAT, N_TILES>(p);                                                              \
  }
#define FEW_OF(FORMAT, NAME) \
  FEW(FORMAT, 1, 8, NAME)    \
  FEW(FORMAT, 2, 16, NAME)  \
  FEW(FORMAT, 4, 32, NAME)

FEW_OF(Q4K, q4_k)
FEW_OF(Q6K, q6_k)
FEW_OF(Q80, q8_0)
FEW_OF(Q40, q4_0)
FEW_OF(Q41, q4_1)
