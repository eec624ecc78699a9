// A token for each row of bf16 logits, in one launch: a cluster of CTAs a row, which reads it from global memory once.
//
// Each CTA keeps its part of the row in shared memory. For top-k and top-p it counts its values by bins; the first CTA
// adds up all bins and finds the value of the last token kept (sample_search.cuh). Then each CTA weighs what is kept of
// its part, warp by warp, and the one in whose part the random point falls finds the token by a scan of one warp's ids.
// Unfiltered rows have no bins. All sums are of integers, so the token depends on neither the cut nor the order.
#pragma once
#include "sample_search.cuh"
#include "sample_slow.cuh"

namespace stoker {

constexpr uint32_t NO_TOKEN = 0x7FFFFFFF;
constexpr int AT_ONCE = 4;  // vectors that a thread loads before it uses the first

template <bool adjust>
struct SampleRow {
  const SampleArguments& a;
  SampleShared& s;
  const int rank, ctas, row, slot, start, ids, vectors;  // `ids` of this CTA from `start` on
  const int* const fields;
  const Values<adjust> values;

  __device__ __forceinline__ SampleRow(const SampleArguments& a, SampleShared& s, unsigned char* data, int row, int slot)
      : a(a), s(s), rank(cluster_rank()), ctas(cluster_size()), row(row), slot(slot), start(rank * a.span),
        ids(min(max(a.vocab - start, 0), a.span)), vectors((ids + VECTOR - 1) / VECTOR), fields(a.fields + slot * COLUMNS),
        values{data} {}

  __device__ __forceinline__ float field(int column) const {
    return __uint_as_float(static_cast<uint32_t>(fields[column]));
  }

  // ---- from global memory ------------------------------------------------------------------------------------------

  // Eight logits; −inf beyond the vocabulary.
  __device__ __forceinline__ uint4 fetch(int vector) const {
    const uint16_t* from = a.logits + static_cast<int64_t>(row) * a.vocab + start + vector * VECTOR;
    uint4 x;
    if (a.vocab % VECTOR == 0) {
      x = load_streamed(from);
    } else {
      uint32_t halves[VECTOR];
      for (int i = 0; i < VECTOR; ++i) halves[i] = vector * VECTOR + i < ids ? from[i] : 0xFF80u;
      x = make_uint4(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16, halves[4] | halves[5] << 16,
                     halves[6] | halves[7] << 16);
    }
    return make_uint4(finite_pair(x.x), finite_pair(x.y), finite_pair(x.z), finite_pair(x.w));
  }

  // Visits the vectors of this thread with what `fetch` gives, several of them under way.
  template <typename Visit>
  __device__ __forceinline__ void each_fetched(Visit visit) const {
    for (int first = thread_id(); first < vectors; first += AT_ONCE * SAMPLE_THREADS) {
      uint4 x[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int vector = first + i * SAMPLE_THREADS;
        if (vector < vectors) x[i] = fetch(vector);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int vector = first + i * SAMPLE_THREADS;
        if (vector < vectors) visit(vector, x[i]);
      }
    }
  }

  // ---- bitmask, bias, penalties ------------------------------------------------------------------------------------

  __device__ __forceinline__ void masked(int vector, float (&v)[VECTOR]) const {
    const int first = start + vector * VECTOR, words = (a.vocab + 31) / 32;
    const uint32_t allowed = static_cast<uint32_t>(a.bitmask[static_cast<int64_t>(row) * words + first / 32]) >> first % 32;
    for (int i = 0; i < VECTOR; ++i) {
      if (!(allowed >> i & 1)) v[i] = LOWEST;
    }
  }

  // Adds the entries of an id one after the other, by the thread that has the first of them: ids ascend.
  __device__ __forceinline__ void add_bias(int position) const {
    const int count = fields[BIAS_COUNT], at = slot * a.most_bias;
    float* const mine = reinterpret_cast<float*>(values.data);
    for (int i = thread_id(); i < count; i += SAMPLE_THREADS) {
      const int id = a.bias_ids[at + i], here = id - start;
      if (here < 0 || here >= ids || (i > 0 && a.bias_ids[at + i - 1] == id)) continue;
      for (int j = i; j < count && a.bias_ids[at + j] == id; ++j) {
        if (a.bias_until[at + j] > position) mine[here] = added(mine[here], a.bias_values[at + j]);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void penalize(int vector, float (&v)[VECTOR]) const {
    const float repetition = field(REPETITION), frequency = field(FREQUENCY), presence = field(PRESENCE);
    const int16_t* from = a.counts + static_cast<int64_t>(slot) * a.vocab + start + vector * VECTOR;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (a.vocab % VECTOR == 0) words = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      int word = static_cast<int>(pairs[i / 2] >> i % 2 * 16 & 0xFFFF);
      if (a.vocab % VECTOR != 0) word = vector * VECTOR + i < ids ? from[i] : 0;
      const int outputs = word & MOST_COUNT;
      if (word == 0) continue;  // both penalties of no output are 0
      v[i] = v[i] > 0.0f ? divided(v[i], repetition) : multiplied(v[i], repetition);
      v[i] = added(v[i], -multiplied(static_cast<float>(outputs), frequency));
      v[i] = added(v[i], -(outputs > 0 ? presence : 0.0f));
    }
    values.store(vector, v);
  }

  // ---- the passes ----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void count(float value) const {
    const uint32_t bits = __float_as_uint(value);
    if (value == LOWEST) return;
    if (is_regular(bits)) {
      count_one(&s.bins[bin_of(bits)]);
    } else {
      const uint32_t at = add_to(&s.num_odd, 1u);
      if (at < ODD) s.odd[at] = value;
    }
  }

  // Brings the values to shared memory and hands each thread's vectors, adjusted, to `visit`.
  template <typename Visit>
  __device__ __forceinline__ void bring(int position, Visit visit) const {
    if constexpr (adjust) {
      each_fetched([&](int vector, const uint4& x) {
        float v[VECTOR];
        Values<false>::unpack(x, v);
        for (int i = 0; i < VECTOR; ++i) v[i] = fminf(v[i], 3.0e38f);
        if (a.bitmask != nullptr) masked(vector, v);
        values.store(vector, v);
      });
      __syncthreads();
      if (fields[BIAS_COUNT] > 0) add_bias(position);
      const bool penalized = fields[PENALIZED] != 0;
      for (int i = thread_id(); i < vectors; i += SAMPLE_THREADS) {
        float v[VECTOR];
        values.load(i, v);
        if (penalized) penalize(i, v);
        visit(v);
      }
    } else {
      each_fetched([&](int vector, const uint4& x) {
        reinterpret_cast<uint4*>(values.data)[vector] = x;
        float v[VECTOR];
        Values<false>::unpack(x, v);
        visit(v);
      });
    }
  }

  // The highest value of the row, after all CTAs have brought their parts.
  __device__ __forceinline__ float peak_of(float highest) const {
    highest = block_max(s, highest);
    if (thread_id() == 0) s.peak = highest;
    cluster_barrier();
    for (int cta = 0; cta < ctas; ++cta) highest = fmaxf(highest, __uint_as_float(load_cluster_4(there(&s.peak, cta))));
    return highest;
  }

  // The first id that has the peak, in the first CTA.
  __device__ __forceinline__ void choose_best(float peak) const {
    uint32_t first = NO_TOKEN;
    for (int i = thread_id(); i < vectors; i += SAMPLE_THREADS) {
      float v[VECTOR];
      values.load(i, v);
      for (int j = 0; j < VECTOR; ++j) {
        if (v[j] == peak && i * VECTOR + j < ids) first = min(first, static_cast<uint32_t>(start + i * VECTOR + j));
      }
    }
    first = block_min(s, first);
    if (thread_id() == 0) store_cluster_4(there(&s.best[rank], 0), first);
    cluster_barrier();
    if (rank != 0 || thread_id() != 0) return;
    for (int cta = 0; cta < ctas; ++cta) first = min(first, s.best[cta]);
    finish(static_cast<int>(first));
  }

  // The weight of this thread's share of a vector's tokens that are kept.
  __device__ __forceinline__ uint64_t mass_of(int vector, const Scale& scale, float bound) const {
    float v[VECTOR];
    values.load(vector, v);
    bool any = false;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) any |= v[i] >= bound;
    uint64_t mass = 0;
    if (any) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const uint64_t w = scale.weight(v[i]);
        if (v[i] >= bound) mass += w;
      }
    }
    return mass;
  }

  __device__ __forceinline__ void draw(const Decision& found, const Scale& scale, int position) const {
    const int lane = thread_id() % 32, warp = thread_id() / 32, per_warp = (vectors + SAMPLE_WARPS - 1) / SAMPLE_WARPS;
    const int begin = min(warp * per_warp, vectors), end = min(begin + per_warp, vectors);
    const float bound = fmaxf(found.bound, scale.relevant);
    uint64_t mass = 0;
    for (int i = begin + lane; i < end; i += 32) mass += mass_of(i, scale, bound);
    mass = over_warp(mass, [](uint64_t x, uint64_t y) { return x + y; });
    if (lane == 0) s.warp_mass[warp] = mass;
    __syncthreads();
    uint64_t mine = 0;
    for (int i = 0; i < SAMPLE_WARPS; ++i) mine += s.warp_mass[i];
    if (thread_id() < ctas) store_cluster_8(there(&s.totals[rank], thread_id()), mine);
    cluster_barrier();
    uint64_t before = 0, total = 0;
    for (int cta = 0; cta < ctas; ++cta) {
      if (cta == rank) before = total;
      total += s.totals[cta];
    }
    const uint64_t point = draw_point(static_cast<uint32_t>(fields[SEED_LOW]), static_cast<uint32_t>(fields[SEED_HIGH]),
                                      static_cast<uint32_t>(position), total);
    for (int i = 0; i < warp; ++i) before += s.warp_mass[i];
    if (point >= before && point < before + s.warp_mass[warp]) find(point - before, begin, end, scale, bound);
  }

  // The token of a warp's ids at which their cumulated weight exceeds `point`.
  __device__ __forceinline__ void find(uint64_t point, int begin, int end, const Scale& scale, float bound) const {
    const int lane = thread_id() % 32;
    for (int first = begin; first < end; first += 32) {
      const int vector = first + lane;
      const uint64_t mass = vector < end ? mass_of(vector, scale, bound) : 0, to = scan_warp(mass, lane);
      if (point >= to - mass && point < to) {
        float v[VECTOR];
        values.load(vector, v);
        uint64_t sum = to - mass;
        for (int i = 0; i < VECTOR; ++i) {
          if (v[i] < bound) continue;
          sum += scale.weight(v[i]);
          if (point < sum) {
            finish(start + vector * VECTOR + i);
            break;
          }
        }
      }
      const uint64_t all = __shfl_sync(0xFFFFFFFFu, to, 31);
      if (point < all) return;
      point -= all;
    }
  }

  // By one thread of the cluster.
  __device__ __forceinline__ void finish(int token) const {
    a.out[row] = token;
    if (adjust && fields[PENALIZED] != 0) {
      int16_t* const at = a.counts + static_cast<int64_t>(slot) * a.vocab + token;
      const int word = *at;
      if ((word & MOST_COUNT) < MOST_COUNT) *at = static_cast<int16_t>(word + 1);
    }
  }

  __device__ __forceinline__ void run() const {
    const int position = a.positions[row], top_k = fields[TOP_K];
    const float temperature = field(TEMPERATURE), top_p = field(TOP_P), min_p = field(MIN_P);
    const bool random = temperature > 0.0f, filter_k = top_k > 0 && top_k < a.vocab;
    if (!random || !(filter_k || top_p < 1.0f)) {
      float highest = LOWEST;
      bring(position, [&](const float(&v)[VECTOR]) {
        for (int i = 0; i < VECTOR; ++i) highest = fmaxf(highest, v[i]);
      });
      highest = peak_of(highest);
      if (!random || highest == LOWEST) return choose_best(highest);
      return draw({highest, LOWEST, DRAW}, Scale(highest, temperature, min_p), position);
    }
    bring(position, [&](const float(&v)[VECTOR]) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) count(v[i]);
    });
    cluster_barrier();
    if (rank == 0) {
      const Decision found = decide(s, ctas, temperature, min_p, filter_k ? top_k : 0, top_p);
      if (thread_id() < ctas) {
        store_cluster_4(there(&s.decision.peak, thread_id()), __float_as_uint(found.peak));
        store_cluster_4(there(&s.decision.bound, thread_id()), __float_as_uint(found.bound));
        store_cluster_4(there(&s.decision.way, thread_id()), found.way);
      }
    }
    cluster_barrier();
    Decision found = s.decision;
    if (found.way == SLOW) {
      SlowSearch<adjust> slow{s, values, vectors, ids, rank, ctas};
      found = slow.decide(temperature, min_p, filter_k ? top_k : 0, top_p);
    }
    if (found.way == BEST) return choose_best(found.peak);
    draw(found, Scale(found.peak, temperature, min_p), position);
  }
};

template <bool adjust>
__device__ __forceinline__ void sm90_sample(const SampleArguments& a) {
  extern __shared__ unsigned char raw[];
  SampleShared& s = *reinterpret_cast<SampleShared*>(raw);
  launch_dependents();
  for (int i = thread_id(); i < BINS; i += SAMPLE_THREADS) s.bins[i] = 0;
  if (thread_id() == 0) s.num_odd = 0;
  __syncthreads();
  grid_dependency_wait();
  const int row = static_cast<int>(blockIdx.x) / cluster_size(), slot = a.row_slots[row];
  if (slot < 0) {
    if (cluster_rank() == 0 && thread_id() == 0) a.out[row] = -1;
    return;
  }
  SampleRow<adjust>(a, s, raw + sizeof(SampleShared), row, slot).run();
}

}  // namespace stoker

#define STOKER_SM90_SAMPLE(name, adjust)                                                                         \
  extern "C" __global__ void __launch_bounds__(stoker::SAMPLE_THREADS, 2)                                        \
      name(const __grid_constant__ stoker::SampleArguments a) {                                                  \
    stoker::sm90_sample<adjust>(a);                                                                              \
  }
