// What a CTA of the sampling kernel keeps in shared memory before its part of the row, and sums over its threads.
#pragma once
#include "sample_row.cuh"

namespace stoker {

constexpr int ODD = 1024;         // odd values that a CTA lists
constexpr int CANDIDATES = 512;  // values that one group is searched among

// The launcher mirrors this in sm90_sample.py.
struct SampleArguments {
  const uint16_t* logits;  // [rows, vocab] bf16
  const int* row_slots;    // [rows]
  const int* positions;    // [rows]
  const int* fields;       // [slots, 16]
  const int* bias_ids;     // [slots, most_bias], as are the next two
  const float* bias_values;
  const int* bias_until;
  int16_t* counts;         // [slots, vocab]
  const int* bitmask;      // [rows, ceil(vocab / 32)], or none
  int* out;                // [rows]
  int vocab, span, most_bias;  // `span` ids a CTA, a multiple of 8
};

// Columns of the fields; see state.py.
enum Column { TEMPERATURE = 1, TOP_K, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, SEED_LOW, SEED_HIGH, PENALIZED, BIAS_COUNT };
constexpr int COLUMNS = 16, MOST_COUNT = 0x7FFF;

enum Way { DRAW, BEST, SLOW };

// What the first CTA of a cluster found: the highest value, the lowest that is kept, and how to go on.
struct Decision {
  float peak, bound;
  uint32_t way;
};

struct Tally {
  uint64_t count, mass;
};

struct SampleShared {
  uint32_t bins[BINS];  // how many regular values; in the first CTA, after the merge, those of the whole row
  uint64_t group_mass[GROUPS];
  uint64_t candidate_weight[CANDIDATES];
  float candidate_value[CANDIDATES];
  uint32_t candidate_count[CANDIDATES];
  uint32_t group_count[GROUPS];
  float odd[ODD];
  uint64_t totals[MOST_CTAS];      // from the other CTAs
  Tally partial[2][MOST_CTAS];     // the same of the slow search, of even and of odd rounds
  uint64_t warp_mass[SAMPLE_WARPS];
  uint64_t warp_room[2 * SAMPLE_WARPS];
  uint32_t best[MOST_CTAS];        // from the other CTAs: the first id of the peak
  Decision decision;
  uint32_t num_odd, num_candidates;
  float peak;                      // of this CTA
  uint32_t found;                  // group, or candidates' winner
  Tally before;                    // what lies above the group found
  Tally reached;                   // what is kept
};
static_assert(sizeof(SampleShared) % 16 == 0);

__device__ __forceinline__ int thread_id() { return static_cast<int>(threadIdx.x); }

// ---- sums over all threads; each ends with the same value in every thread ------------------------------------------

template <typename T, typename Combine>
__device__ __forceinline__ T over_warp(T x, Combine combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

template <typename T, typename Combine>
__device__ __forceinline__ T over_block(SampleShared& s, T x, Combine combine) {
  T* room = reinterpret_cast<T*>(s.warp_room);
  x = over_warp(x, combine);
  __syncthreads();
  if (thread_id() % 32 == 0) room[thread_id() / 32] = x;
  __syncthreads();
  x = room[0];
#pragma unroll
  for (int i = 1; i < SAMPLE_WARPS; ++i) x = combine(x, room[i]);
  return x;
}

__device__ __forceinline__ float block_max(SampleShared& s, float x) {
  return over_block(s, x, [](float a, float b) { return fmaxf(a, b); });
}
__device__ __forceinline__ uint32_t block_min(SampleShared& s, uint32_t x) {
  return over_block(s, x, [](uint32_t a, uint32_t b) { return min(a, b); });
}
__device__ __forceinline__ uint64_t block_sum(SampleShared& s, uint64_t x) {
  return over_block(s, x, [](uint64_t a, uint64_t b) { return a + b; });
}

__device__ __forceinline__ uint64_t scan_warp(uint64_t x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t before = __shfl_sync(0xFFFFFFFFu, x, lane - step & 31);
    if (lane >= step) x += before;
  }
  return x;
}

// The sum of x over this thread and those before it.
__device__ __forceinline__ uint64_t scan_block(SampleShared& s, uint64_t x) {
  const int lane = thread_id() % 32, warp = thread_id() / 32;
  x = scan_warp(x, lane);
  __syncthreads();
  if (lane == 31) s.warp_room[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x += s.warp_room[i];
  return x;
}

// An address in CTA `rank` of what lies at `here` in this one.
__device__ __forceinline__ uint32_t there(const void* here, int rank) { return cluster_address(shared_address(here), rank); }

__device__ __forceinline__ void cluster_barrier() {
  cluster_publish();
  cluster_wait();
}

}  // namespace stoker
