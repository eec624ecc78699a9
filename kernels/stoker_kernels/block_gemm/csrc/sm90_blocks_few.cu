// y = x · Wᵀ + bias for up to 32 tokens and weights in GGUF's planes, where the bytes of the weight are the limit.
//
// A cluster has some tiles of 16 rows, its CTAs share the columns, and so do the eight warps of each: a warp keeps x of one
// or two steps of 256 columns in registers and takes them of a tile after the other, its units coming by copies of its own
// into a ring of its own. What the warps found of a tile is added in their order, then what the CTAs found. Weights are
// requested before the kernel before is done.
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
  int split;  // CTAs of a cluster: each has steps / split steps, rounded up, at most those that its warps keep
};

constexpr int BLOCK_WARPS = 8, BLOCK_THREADS = BLOCK_WARPS * 32;

// Of up to 16 tokens two CTAs find room in an SM, of 32 one.
template <int N_TILES>
struct FewTokens {
  static constexpr int TOKENS = 8 * N_TILES, CTAS = N_TILES > 2 ? 1 : 2, SLICES = N_TILES > 1 ? 1 : 2;
  static constexpr int SHARED_BYTES = (CTAS == 2 ? 113 : 227) * 1024, CHUNK_TILES = N_TILES == 2 ? 12 : 16;
};

// The rings and the sums in shared memory.
template <class F, int N_TILES>
struct BlockShared {
  using T = FewTokens<N_TILES>;
  static constexpr int SUM_STRIDE = UNIT_ROWS + 4, WARP_SUMS = T::TOKENS * SUM_STRIDE, RESULTS = T::TOKENS * UNIT_ROWS;
  static constexpr int SUM_BYTES = 4 * T::TOKENS * (2 * BLOCK_WARPS * SUM_STRIDE + T::CHUNK_TILES * UNIT_ROWS);
  // Tiles ahead in a warp's ring.
  static constexpr int DEPTH = (T::SHARED_BYTES - SUM_BYTES) / (BLOCK_WARPS * T::SLICES * F::UNIT_BYTES);
  float* sums;   // [2][warps][tokens][SUM_STRIDE], of tiles in turn
  float* whole;  // [tiles of a chunk][tokens][16], where a cluster shares the columns
  unsigned char* ring;

  __device__ __forceinline__ BlockShared(unsigned char* raw, int warp) {
    sums = reinterpret_cast<float*>(raw);
    whole = sums + 2 * BLOCK_WARPS * WARP_SUMS;
    ring = raw + SUM_BYTES + warp * DEPTH * T::SLICES * F::UNIT_BYTES;
  }
};

// A lane's share of the copies of a warp's next tile: of each 4 rows of 128 bytes or 8 of 64 one chunk of 16, and one of
// the scales. A warp's second step is BLOCK_WARPS further.
template <class F>
struct UnitSource {
  static constexpr int HIGH_ROW = F::HIGH_BYTES / UNIT_ROWS, HIGH_LANES = HIGH_ROW == 64 ? 4 : 8;
  const unsigned char *low, *high, *rest;
  uint32_t row;  // bytes from a row to the next one, of which `high` has as many, or half
  uint32_t rest_step;

  __device__ __forceinline__ UnitSource(const BlockArguments& p, int tile, int step, int lane) {
    row = p.steps * 128;
    const int64_t first = tile * UNIT_ROWS;
    low = p.low + (first + lane / 8) * row + step * 128 + lane % 8 * 16;
    high = p.high + (first + lane / HIGH_LANES) * (p.steps * HIGH_ROW) + step * HIGH_ROW + lane % HIGH_LANES * 16;
    const int word = lane / 8;
    const bool factors = word >= F::SCALE_WORDS;
    rest_step = p.n * (factors ? 4 : 8 * F::SCALE_WORDS);
    rest = factors ? p.factor + first * 4 : p.scale + static_cast<int64_t>(word) * p.n * 8 + first * 8;
    rest += static_cast<int64_t>(step) * rest_step + lane % 8 * 16;
  }
  __device__ __forceinline__ void next(int lane) {
    low += UNIT_ROWS * row;
    if constexpr (HIGH_ROW > 0) high += UNIT_ROWS / (128 / HIGH_ROW) * row;
    rest += UNIT_ROWS * (lane / 8 >= F::SCALE_WORDS ? 4 : 8);
  }
  // Rows four further have the other half of the chunks first.
  __device__ __forceinline__ void send(uint32_t unit, int slice, int lane, uint64_t policy) const {
    const uint32_t at = lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    const unsigned char* from = low;
#pragma unroll
    for (int i = 0; i < UNIT_ROWS / 4; i++, from += 4 * row) {
      copy_weight(unit + (at ^ i % 2 * 64) + i * 512, from + slice * BLOCK_WARPS * 128, policy);
    }
    if constexpr (HIGH_ROW > 0) {
      const uint32_t above = HIGH_ROW == 64 ? lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16 : at;
      from = high;
#pragma unroll
      for (int i = 0; i < F::HIGH_BYTES / 512; i++, from += 4 * row) {
        const uint32_t place = HIGH_ROW == 64 ? above : above ^ i % 2 * 64;
        copy_weight(unit + F::LOW_BYTES + place + i * 512, from + slice * BLOCK_WARPS * HIGH_ROW, policy);
      }
    }
    if (lane * 16 < F::REST_BYTES) {
      copy_weight(unit + F::LOW_BYTES + F::HIGH_BYTES + lane * 16, rest + slice * BLOCK_WARPS * rest_step, policy);
    }
  }
};

// A sum → the result.
__device__ __forceinline__ void store_sum(const BlockArguments& p, int token, int column, float sum) {
  if (token >= p.m) return;
  float value = sum * SUM_UNIT;
  if (p.bias != nullptr) value += __bfloat162float(p.bias[column]);
  const uint32_t rounded = pack_bf16(value, 0.f);
  uint16_t* out = reinterpret_cast<uint16_t*>(p.out) + static_cast<int64_t>(token) * p.ld_out + column;
  *out = static_cast<uint16_t>(rounded);
}

// What the warps found of a tile → the result, or what the cluster adds up.
template <class F, int N_TILES>
__device__ __forceinline__ void finish_tile(const BlockArguments& p, const BlockShared<F, N_TILES>& s, int turn, int tile,
                                            float* whole) {
  using S = BlockShared<F, N_TILES>;
  const int buffer = turn % 2, thread = threadIdx.x;
  if (S::RESULTS < BLOCK_THREADS && thread / S::RESULTS != buffer) return;  // halves of the CTA in turn
#pragma unroll
  for (int at = thread % S::RESULTS; at < S::RESULTS; at += BLOCK_THREADS) {
    const int token = at / UNIT_ROWS, row = at % UNIT_ROWS;
    const float* found = s.sums + buffer * BLOCK_WARPS * S::WARP_SUMS + token * S::SUM_STRIDE + row;
    float sum = found[0];
#pragma unroll
    for (int warp = 1; warp < BLOCK_WARPS; warp++) sum += found[warp * S::WARP_SUMS];
    if (p.split > 1) {
      whole[at] = sum;
    } else {
      store_sum(p, token, tile * UNIT_ROWS + row, sum);
    }
  }
}

// What the CTAs of a cluster found of a chunk of tiles → the result, a share by each. Every thread of the cluster comes.
template <class F, int N_TILES>
__device__ __forceinline__ void finish_chunk(const BlockArguments& p, const BlockShared<F, N_TILES>& s, int rank, int first,
                                             int tiles) {
  using S = BlockShared<F, N_TILES>;
  block_cluster_sync();
  for (int at = threadIdx.x + rank * BLOCK_THREADS; at < tiles * S::RESULTS; at += BLOCK_THREADS * p.split) {
    float sum = read_peer_float(s.whole + at, 0);
#pragma unroll 1
    for (int peer = 1; peer < p.split; peer++) sum += read_peer_float(s.whole + at, peer);
    const int result = at % S::RESULTS;
    store_sum(p, result / UNIT_ROWS, (first + at / S::RESULTS) * UNIT_ROWS + result % UNIT_ROWS, sum);
  }
  block_cluster_sync();  // nobody leaves, or goes on, while its sums are read
}

template <class F, int N_TILES>
__device__ __forceinline__ void blocks_few(const BlockArguments& p) {
  using S = BlockShared<F, N_TILES>;
  constexpr int SLICES = S::T::SLICES, CHUNK = S::T::CHUNK_TILES, UNITS = S::DEPTH * SLICES;
  extern __shared__ unsigned char raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = p.n / UNIT_ROWS;
  const int rank = blockIdx.x % p.split, cluster = blockIdx.x / p.split, clusters = gridDim.x / p.split;
  const int from = static_cast<int64_t>(cluster) * tiles / clusters;
  const int to = static_cast<int64_t>(cluster + 1) * tiles / clusters;
  const int each = (p.steps + p.split - 1) / p.split, step = rank * each + warp;
  const int own = min((rank + 1) * each, p.steps) - step;  // more than 0: the warp has a step; than BLOCK_WARPS: two
  const S s(raw, warp);
  const uint64_t policy = policy_evict_first();
  UnitSource<F> source(p, from, own > 0 ? step : 0, lane);
  int asked = from;  // tiles
  const auto ask = [&](int place, int slice) {
    if (asked < to && own > slice * BLOCK_WARPS) {
      source.send(shared_address(s.ring) + (place * SLICES + slice) * F::UNIT_BYTES, slice, lane, policy);
    }
    copies_commit();
    if (slice + 1 == SLICES) {
      source.next(lane);
      asked++;
    }
  };
#pragma unroll 1
  for (int i = 0; i < S::DEPTH; i++) {
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) ask(i, slice);
  }
  launch_dependents();
  grid_dependency_wait();

  // In a register, as the compiler cannot know it: an instruction has one constant.
  const uint32_t magic = p.m > 0 ? 0x4B000000u : 0u;
  BlockX<F, N_TILES> x[SLICES];
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    if (own > slice * BLOCK_WARPS) {
      x[slice].read(p.x + (step + slice * BLOCK_WARPS) * UNIT_COLUMNS, p.ld_x, p.m, lane);
    }
  }
  int place = 0, of_chunk = 0;
#pragma unroll 1
  for (int tile = from; tile < to; tile++) {
    float total[N_TILES][4] = {};
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      copies_wait_group<UNITS - 1>();
      __syncwarp();
      if (own > slice * BLOCK_WARPS) {
        const unsigned char* unit = s.ring + (place * SLICES + slice) * F::UNIT_BYTES;
        multiply_unit<F, N_TILES>({unit, unit + F::LOW_BYTES, unit + F::LOW_BYTES + F::HIGH_BYTES}, x[slice], total, lane,
                                  magic, [&] {
                                    __syncwarp();
                                    ask(place, slice);
                                  });
      } else {
        ask(place, slice);
      }
    }
    if (++place == S::DEPTH) place = 0;
    const int turn = (tile - from) % 2;
    float* mine = s.sums + (turn * BLOCK_WARPS + warp) * S::WARP_SUMS + lane % 4 * 2 * S::SUM_STRIDE + lane_row(lane);
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) mine[(n * 8 + i % 2) * S::SUM_STRIDE + i / 2 * 8] = total[n][i];
    __syncthreads();
    finish_tile<F, N_TILES>(p, s, turn, tile, s.whole + of_chunk * S::RESULTS);
    if (p.split > 1 && (++of_chunk == CHUNK || tile + 1 == to)) {
      finish_chunk<F, N_TILES>(p, s, rank, tile + 1 - of_chunk, of_chunk);
      of_chunk = 0;
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
