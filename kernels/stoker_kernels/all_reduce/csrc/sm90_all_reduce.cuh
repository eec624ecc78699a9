// Sums of bf16 rows over the GPUs of one machine, with the addition to the residual stream, the RMS norm and the FP8
// quantization that follow, in one launch and without a barrier.
//
// Every rank has an inbox that its peers write to over NVLink. A message carries no flag: the inbox is full of a word that
// no message contains (two negative zeros; a message has positive ones in their place), and a word is there once it is
// another one (as in NCCL's LL and TensorRT-LLM's Lamport kernels). Three slots take turns: what step k reads was cleared in
// step k − 2, and a peer that writes to a slot again has had this rank's words of the step after that clearing.
//
// One shot: each rank sends its rows to all, and adds all up. Two shots: a row's words go to the rank that owns it, which
// sends the sum to all. Of rows that were copied from the peers before, and lie there, a launch of this rank alone makes
// the sum. In all three, words are added in the order of ranks in fp32 and rounded once: the bits are the same,
// whichever way they came.
// In one shot a CTA sends its next row before it waits for this one, so that the wire is busy while it adds up; in two it
// sends everything before it waits for anything. It waits for the same CTA of its peers alone, all CTAs of a launch run at
// once, and the number of CTAs and whose rows are whose depend on the shape alone: no rank waits for one that waits for it.
#pragma once
#include "peer_ptx.cuh"

namespace stoker {

constexpr int ALL_REDUCE_MOST_RANKS = 8;
constexpr int ALL_REDUCE_SLOTS = 3;
constexpr int ALL_REDUCE_PER_THREAD = 2;  // vectors of a row that a thread has at most
constexpr int ALL_REDUCE_MOST_THREADS = 1024;
constexpr uint32_t ABSENT = 0x80008000u;
constexpr float E4M3_MAX = 448.0f, LEAST_SCALE = 1e-12f;

enum class Way { ONE_SHOT, TWO_SHOTS, COPIED };
enum class After { NOTHING, NORM, NORM_E4M3 };

// Of this rank alone. `sent` and `summed`: 16-byte vectors of the message that lies in each slot.
struct AllReduceState {
  uint32_t step, arrived;
  uint32_t sent[ALL_REDUCE_SLOTS], summed[ALL_REDUCE_SLOTS];
};

struct AllReduceArguments {
  unsigned char* inboxes[ALL_REDUCE_MOST_RANKS];  // [slots][ranks + 1][capacity]; the last place is for sums.
                                                  // Of copied rows: each rank's [rows, vectors] on this GPU
  const uint4* x;                                 // [rows, vectors]
  void* out;                                      // of x's shape; may be x. Of e4m3, half as wide
  uint4* residual;                                // [rows, vectors], or null
  const void* weight;                             // [8 · vectors] of bf16 or fp32
  float* scales;                                  // [rows]
  AllReduceState* state;
  int64_t capacity;  // bytes
  float eps;
  int ranks, rank, rows, vectors, wide_weight;
};

// What warps leave for the whole CTA.
struct AllReduceShared {
  float parts[ALL_REDUCE_MOST_THREADS / 32];
};

__device__ __forceinline__ uint32_t present(uint32_t x) { return x == ABSENT ? 0u : x; }
__device__ __forceinline__ uint4 present(uint4 x) {
  return make_uint4(present(x.x), present(x.y), present(x.z), present(x.w));
}

__device__ __forceinline__ uint4 await(const unsigned char* at) {
  uint4 x = load_shared_with_peers(at);
  while (x.x == ABSENT || x.y == ABSENT || x.z == ABSENT || x.w == ABSENT) {
    look_again();
    x = load_shared_with_peers(at);
  }
  return x;
}

__device__ __forceinline__ void add_pairs(float (&sum)[8], uint4 x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_low(words[i]);
    sum[2 * i + 1] += bf16_high(words[i]);
  }
}
__device__ __forceinline__ uint4 rounded(const float (&v)[8]) {
  return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

template <Way way, After after>
struct AllReduce {
  const AllReduceArguments& a;
  AllReduceShared& s;
  const int slot;

  // Where the words of a message that `from` sends to `to` lie; `from` = ranks is for sums.
  __device__ __forceinline__ unsigned char* place(int to, int in_slot, int from) const {
    return a.inboxes[to] + (static_cast<int64_t>(in_slot) * (a.ranks + 1) + from) * a.capacity;
  }
  __device__ __forceinline__ uint32_t vector_of(int row, int v) const { return row * a.vectors + v; }
  __device__ __forceinline__ int owner(int row) const { return (row + row / static_cast<int>(gridDim.x)) % a.ranks; }
  __device__ __forceinline__ uint4 own(uint32_t at) const { return present(a.x[at]); }

  // Peers are visited from the next one on, so that not all write to the same one first.
  __device__ __forceinline__ void send_to_peers(int from, uint32_t at, uint4 x) const {
    for (int i = 1; i < a.ranks; ++i) {
      const int to = (a.rank + i) % a.ranks;
      store_shared_with_peers(place(to, slot, from) + static_cast<int64_t>(at) * 16, x);
    }
  }

  __device__ __forceinline__ void send(int row) const {
    for (int v = threadIdx.x; v < a.vectors; v += threads()) {
      const uint32_t at = vector_of(row, v);
      if (way == Way::ONE_SHOT) {
        send_to_peers(a.rank, at, own(at));
      } else if (owner(row) != a.rank) {
        store_shared_with_peers(place(owner(row), slot, a.rank) + static_cast<int64_t>(at) * 16, own(at));
      }
    }
  }

  __device__ __forceinline__ uint4 of_peer(int from, uint32_t at) const {
    if (way == Way::COPIED) return reinterpret_cast<const uint4*>(a.inboxes[from])[at];
    return await(place(a.rank, slot, from) + static_cast<int64_t>(at) * 16);
  }

  // All ranks' words of one vector, added up.
  __device__ __forceinline__ uint4 sum(uint32_t at) const {
    float total[8] = {};
    for (int from = 0; from < a.ranks; ++from) {
      add_pairs(total, from == a.rank ? own(at) : of_peer(from, at));
    }
    return present(rounded(total));
  }

  __device__ __forceinline__ void send_sums() const {
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
      if (owner(row) != a.rank) continue;
      for (int v = threadIdx.x; v < a.vectors; v += threads()) {
        const uint32_t at = vector_of(row, v);
        const uint4 x = sum(at);
        send_to_peers(a.ranks, at, x);
        store_shared_with_peers(place(a.rank, slot, a.ranks) + static_cast<int64_t>(at) * 16, x);
      }
    }
  }

  __device__ __forceinline__ uint4 whole(uint32_t at) const {
    if (way == Way::TWO_SHOTS) return await(place(a.rank, slot, a.ranks) + static_cast<int64_t>(at) * 16);
    return sum(at);
  }

  // The slot of the step before, whose words every thread of this rank has read.
  __device__ __forceinline__ void clear() const {
    const int before = (slot + ALL_REDUCE_SLOTS - 1) % ALL_REDUCE_SLOTS;
    const uint4 absent = make_uint4(ABSENT, ABSENT, ABSENT, ABSENT);
    for (int from = 0; from <= a.ranks; ++from) {
      if (from == a.rank) continue;
      unsigned char* const at = place(a.rank, before, from);
      const uint32_t vectors = from == a.ranks ? a.state->summed[before] : a.state->sent[before];
      for (uint32_t v = blockIdx.x * threads() + threadIdx.x; v < vectors; v += gridDim.x * threads()) {
        store_shared_with_peers(at + static_cast<int64_t>(v) * 16, absent);
      }
    }
  }

  // ---- what follows the sum ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void finish(int row) const {
    if (after == After::NOTHING) {
      for (int v = threadIdx.x; v < a.vectors; v += threads()) {
        const uint32_t at = vector_of(row, v);
        static_cast<uint4*>(a.out)[at] = whole(at);
      }
    } else {
      norm(row);
    }
  }

  __device__ __forceinline__ void norm(int row) const {
    float values[ALL_REDUCE_PER_THREAD][8] = {};
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ALL_REDUCE_PER_THREAD; ++i) {
      const int v = threadIdx.x + i * threads();
      if (v < a.vectors) {
        const uint32_t at = vector_of(row, v);
        add_pairs(values[i], a.residual[at]);
        add_pairs(values[i], whole(at));
        const uint4 kept = rounded(values[i]);
        a.residual[at] = kept;
        for (float& value : values[i]) value = 0.0f;
        add_pairs(values[i], kept);
        for (const float value : values[i]) squares += value * value;
      }
    }
    const float factor = inverse_root(over_cta<false>(squares) / static_cast<float>(8 * a.vectors) + a.eps);
    float greatest = 0.0f;
#pragma unroll
    for (int i = 0; i < ALL_REDUCE_PER_THREAD; ++i) {
      const int v = threadIdx.x + i * threads();
      if (v < a.vectors) {
        weigh(values[i], v, factor);
        for (const float value : values[i]) greatest = fmaxf(greatest, fabsf(value));
      }
    }
    const float scale = after == After::NORM_E4M3 ? fmaxf(over_cta<true>(greatest) * (1.0f / E4M3_MAX), LEAST_SCALE) : 1.0f;
    if (after == After::NORM_E4M3 && threadIdx.x == 0) a.scales[row] = scale;
    const float unit = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < ALL_REDUCE_PER_THREAD; ++i) {
      const int v = threadIdx.x + i * threads();
      if (v < a.vectors) store(vector_of(row, v), values[i], unit);
    }
  }

  __device__ __forceinline__ void weigh(float (&values)[8], int vector, float factor) const {
    float weights[8] = {};
    if (a.wide_weight) {
      const float* from = static_cast<const float*>(a.weight) + vector * 8;
      for (int i = 0; i < 8; ++i) weights[i] = from[i];
    } else {
      add_pairs(weights, static_cast<const uint4*>(a.weight)[vector]);
    }
    for (int i = 0; i < 8; ++i) values[i] = values[i] * factor * weights[i];
  }

  __device__ __forceinline__ void store(uint32_t at, const float (&v)[8], float unit) const {
    if (after == After::NORM) {
      static_cast<uint4*>(a.out)[at] = rounded(v);
    } else {
      static_cast<uint2*>(a.out)[at] =
          make_uint2(e4m3_pair(v[0] * unit, v[1] * unit) | e4m3_pair(v[2] * unit, v[3] * unit) << 16,
                     e4m3_pair(v[4] * unit, v[5] * unit) | e4m3_pair(v[6] * unit, v[7] * unit) << 16);
    }
  }

  // The sum, or the greatest, of all threads' values, in an order of its own that no timing changes.
  template <bool greatest>
  __device__ __forceinline__ float over_cta(float x) const {
    for (int mask = 16; mask > 0; mask /= 2) x = join<greatest>(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    __syncthreads();  // the parts of the last time have been read
    if (threadIdx.x % 32 == 0) s.parts[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < threads() / 32; ++warp) total = join<greatest>(total, s.parts[warp]);
    return total;
  }
  template <bool greatest>
  static __device__ __forceinline__ float join(float x, float y) { return greatest ? fmaxf(x, y) : x + y; }

  // ---- the step ----------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ int threads() { return static_cast<int>(blockDim.x); }

  __device__ __forceinline__ void run() const {
    const int first = blockIdx.x, step = gridDim.x;
    if (way == Way::TWO_SHOTS) {
      for (int row = first; row < a.rows; row += step) send(row);
      send_sums();
    }
#pragma unroll 1  // one copy of what stands within
    for (int row = first - step; row < a.rows; row += step) {
      if (way == Way::ONE_SHOT && row + step < a.rows) send(row + step);
      if (row >= first) {
        finish(row);
      } else if (way != Way::COPIED) {
        clear();
      }
    }
    if (way != Way::COPIED) leave();
  }

  // The CTA that ends last moves the rank on; by then every CTA has read where it stood.
  __device__ __forceinline__ void leave() const {
    __syncthreads();
    if (threadIdx.x != 0 || count_arrival(&a.state->arrived) != gridDim.x - 1) return;
    const uint32_t vectors = static_cast<uint32_t>(a.rows) * static_cast<uint32_t>(a.vectors);
    a.state->sent[slot] = vectors;
    a.state->summed[slot] = way == Way::TWO_SHOTS ? vectors : 0;
    a.state->arrived = 0;
    a.state->step = (slot + 1) % ALL_REDUCE_SLOTS;
  }
};

template <Way way, After after>
__device__ __forceinline__ void sm90_all_reduce(const AllReduceArguments& a) {
  extern __shared__ unsigned char raw[];
  launch_dependents();
  grid_dependency_wait();
  const int slot = way == Way::COPIED ? 0 : static_cast<int>(a.state->step);
  AllReduce<way, after>{a, *reinterpret_cast<AllReduceShared*>(raw), slot}.run();
}

// A grid of one thread, which ends once a peer has written `value` behind what it copied here.
__device__ __forceinline__ void sm90_await_peer(const uint32_t* word, uint32_t value) {
  grid_dependency_wait();
  while (load_word_of_peer(word) != value) look_again();
}

}  // namespace stoker

// Up to 64 registers: a CTA of 1,024 threads an SM, or two of 512 (rule.py counts on it).
#define STOKER_SM90_ALL_REDUCE(name, way, after)                                                                     \
  extern "C" __global__ void __launch_bounds__(1024, 1) name(const __grid_constant__ stoker::AllReduceArguments a) { \
    stoker::sm90_all_reduce<stoker::Way::way, stoker::After::after>(a);                                              \
  }
