// y = x · Wᵀ + bias for up to 16 tokens and weights in GGUF's planes, where the bytes of the weight are the limit.
//
// A CTA has some tiles of 16 rows. Its eight warps share the columns: each keeps x of one or two steps of 256 columns in
// registers and takes them of a tile after the other, its units coming by bulk copies into a ring of its own, which asks
// nobody else. What the warps found of a tile is added in their order. Where a row has more steps than the warps keep, they
// run through the tiles of a chunk again. Weights are requested before the kernel before is done.
#include <cuda.h>

#include "block_units.cuh"

namespace stoker {

struct BlockArguments {
  __nv_bfloat16* out;         // [m, ld_out]
  const __nv_bfloat16* x;     // [m, ld_x]
  const __nv_bfloat16* bias;  // [n] or null
  const unsigned char* scale;   // [steps, words of 8 bytes, n]
  const unsigned char* factor;  // [steps, n] of 4 bytes, or null
  int m, n, steps, ld_x, ld_out;
  int stages;  // of each warp's ring
};

constexpr int BLOCK_WARPS = 8, CHUNK_TILES = 8;

// Which unit comes next: chunks of tiles, passes of steps, tiles, and the steps that a warp keeps.
template <int SLICES>
struct UnitCursor {
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
  static constexpr int TOKENS = 8 * N_TILES, SUM_STRIDE = UNIT_ROWS + 4, WARP_SUMS = TOKENS * SUM_STRIDE;
  unsigned char *low, *high, *rest;
  float* sums;   // [2][warps][tokens][SUM_STRIDE], of tiles in turn
  float* whole;  // [CHUNK_TILES][tokens][16], where there are several passes
  uint32_t barriers;

  __device__ __forceinline__ BlockShared(unsigned char* raw, int stages) {
    unsigned char* base = raw + (1024 - shared_address(raw) % 1024) % 1024;
    const int units = BLOCK_WARPS * stages;
    low = base;
    high = low + units * F::LOW_BYTES;
    rest = high + units * F::HIGH_BYTES;
    sums = reinterpret_cast<float*>(rest + units * F::REST_BYTES);
    whole = sums + 2 * BLOCK_WARPS * WARP_SUMS;
    barriers = shared_address(whole + CHUNK_TILES * TOKENS * UNIT_ROWS);
  }
};

// A lane's part in asking for a unit: 0 and 1 planes, those behind a word of scales each, then the factors.
template <class F, int N_TILES>
struct UnitRequest {
  const unsigned char* from;
  int64_t step_bytes;
  int row_bytes, bytes, at;

  __device__ __forceinline__ UnitRequest(const BlockArguments& p, int lane) {
    const int word = lane - 2;
    const bool factors = word >= F::SCALE_WORDS;
    row_bytes = factors ? 4 : 8;
    from = factors ? p.factor : p.scale + static_cast<int64_t>(word) * p.n * 8;
    step_bytes = static_cast<int64_t>(p.n) * (factors ? 4 : 8 * F::SCALE_WORDS);
    bytes = UNIT_ROWS * row_bytes;
    at = factors ? F::SCALE_BYTES : word * UNIT_ROWS * 8;
  }
  __device__ __forceinline__ void send(const BlockShared<F, N_TILES>& s, const CUtensorMap& low, const CUtensorMap& high,
                                       int slot, int step, int row, int lane, uint64_t policy) const {
    const uint32_t barrier = s.barriers + slot * 8;
    if (lane == 0) {
      mbarrier_arrive_expect(barrier, F::UNIT_BYTES);
      tensor_load_2d(shared_address(s.low + slot * F::LOW_BYTES), &low, step * 128, row, barrier, policy);
    } else if (F::HIGH_BYTES > 0 && lane == 1) {
      const int inner = step * (F::HIGH_BYTES / UNIT_ROWS);
      tensor_load_2d(shared_address(s.high + slot * F::HIGH_BYTES), &high, inner, row, barrier, policy);
    } else if (lane >= 2 && lane < 2 + F::SCALE_WORDS + (F::BYTES ? 1 : 0)) {
      const unsigned char* source = from + step * step_bytes + row * row_bytes;
      bulk_load(shared_address(s.rest + slot * F::REST_BYTES + at), source, bytes, barrier, policy);
    }
  }
};

// What the warps found of a tile → the result, or what further passes add to.
template <class F, int N_TILES>
__device__ __forceinline__ void finish_tile(const BlockArguments& p, const BlockShared<F, N_TILES>& s, int turn, int tile,
                                            int of_chunk, bool first_pass, bool last_pass) {
  using S = BlockShared<F, N_TILES>;
  constexpr int RESULTS = S::TOKENS * UNIT_ROWS, THREADS = BLOCK_WARPS * 32;
  const int buffer = turn % 2, at = threadIdx.x % RESULTS;
  if (RESULTS < THREADS && static_cast<int>(threadIdx.x) / RESULTS != buffer) return;  // halves of the CTA in turn
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

template <class F, int N_TILES>
__device__ __forceinline__ void blocks_few(const CUtensorMap& low, const CUtensorMap& high, const BlockArguments& p) {
  constexpr int SLICES = 2 / N_TILES;
  using S = BlockShared<F, N_TILES>;
  extern __shared__ unsigned char raw[];
  const S s(raw, p.stages);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = p.n / UNIT_ROWS;
  const int from = static_cast<int64_t>(blockIdx.x) * tiles / gridDim.x;
  const int to = static_cast<int64_t>(blockIdx.x + 1) * tiles / gridDim.x;
  const int own = warp * p.stages;
  if (lane == 0) {
    for (int i = 0; i < p.stages; i++) mbarrier_init(s.barriers + (own + i) * 8, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  const uint64_t policy = policy_evict_first();
  const UnitRequest<F, N_TILES> request(p, lane);
  UnitCursor<SLICES> ahead(from, to, warp >= p.steps);
  for (int i = 0; i < p.stages && !ahead.done(); i++) {
    request.send(s, low, high, own + i, ahead.step(warp), ahead.tile * UNIT_ROWS, lane, policy);
    ahead.next(p.steps, warp);
  }
  launch_dependents();
  grid_dependency_wait();

  const int passes = (p.steps + BLOCK_WARPS * SLICES - 1) / (BLOCK_WARPS * SLICES);
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  for (int chunk = from; chunk < to; chunk += CHUNK_TILES) {
    for (int pass = 0; pass < passes; pass++) {
      BlockX<F, N_TILES> x[SLICES];
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        const int step = (pass * SLICES + slice) * BLOCK_WARPS + warp;
        if (step < p.steps) x[slice].read(p.x + step * UNIT_COLUMNS, p.ld_x, p.m, lane);
      }
      for (int tile = chunk; tile < min(chunk + CHUNK_TILES, to); tile++, turn++) {
        float total[N_TILES][4] = {};
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
          if ((pass * SLICES + slice) * BLOCK_WARPS + warp >= p.steps) break;
          const int slot = own + stage;
          mbarrier_wait(s.barriers + slot * 8, phase);
          const UnitPlace unit = {s.low + slot * F::LOW_BYTES, s.high + slot * F::HIGH_BYTES, s.rest + slot * F::REST_BYTES};
          multiply_unit<F, N_TILES>(unit, x[slice], total, lane, [&] {
            __syncwarp();
            if (ahead.done()) return;
            request.send(s, low, high, slot, ahead.step(warp), ahead.tile * UNIT_ROWS, lane, policy);
            ahead.next(p.steps, warp);
          });
          if (++stage == p.stages) stage = 0, phase ^= 1;
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

#define FEW(FORMAT, N_TILES, TOKENS, NAME)                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 2) sm90_blocks_few_##NAME##_m##TOKENS(                 \
      const __grid_constant__ CUtensorMap low, const __grid_constant__ CUtensorMap high,                   \
      const __grid_constant__ stoker::BlockArguments p) {                                                  \
    stoker::blocks_few<stoker::FORMAT, N_TILES>(low, high, p);                                             \
  }
#define FEW_OF(FORMAT, NAME) \
  FEW(FORMAT, 1, 8, NAME)    \
  FEW(FORMAT, 2, 16, NAME)

FEW_OF(Q4K, q4_k)
FEW_OF(Q6K, q6_k)
FEW_OF(Q80, q8_0)
FEW_OF(Q40, q4_0)
FEW_OF(Q41, q4_1)
