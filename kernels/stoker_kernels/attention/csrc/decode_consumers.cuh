// sm90_decode's consumer warps: weights, values, and the end of a stream.
#pragma once
#include "decode_fragments.cuh"

namespace stoker {

// Hands the weights of the warp's 16 keys to all warps. They are relative to the stream's running maxima, unless these
// keys exceed one by SLACK; the maxima they are relative to go with them.
template <typename Cache>
__device__ __forceinline__ void weigh_keys(const Result& a, const Fragments<Cache>& f, Exchange& to, const Header& h,
                                           uint32_t tile, float qk_scale, float softcap, int warp, int lane) {
  float m[2] = {a.m[0], a.m[1]};
  uint2 weights = {0, 0};
  if (h.valid > warp * 16 && h.low < warp * 16 + 16) {
    float s[4] = {};
    f.multiply_keys(s, tile, warp, lane);
    const bool whole = h.low == 0 && h.valid == UNIT;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[c] *= qk_scale;
      if (softcap > 0.0f) s[c] = soft_cap(s[c], softcap);
      const int key = warp * 16 + lane / 4 + c / 2 * 8;
      if (!whole && (key < h.low || key >= h.valid)) s[c] = -INFINITY;
    }
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    if (__any_sync(~0u, top[0] > m[0] + SLACK || top[1] > m[1] + SLACK)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], offset));
        m[c] = fmaxf(m[c], top[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] = exp2_approx(s[c] - m[c % 2]);
    weights.x = transpose_8x8(Fragments<Cache>::pack(s[0], s[1]));
    weights.y = transpose_8x8(Fragments<Cache>::pack(s[2], s[3]));
  }
  to.weights[warp][lane] = weights;
  if (lane < 4) to.maxima[2 * lane][warp] = m[0], to.maxima[2 * lane + 1][warp] = m[1];
}

__device__ __forceinline__ float weight(float m, float maximum) {
  return m == -INFINITY ? 0.0f : exp2_approx(m - maximum);
}

// Takes the sums to the maxima `top`, which are no lower than theirs.
__device__ __forceinline__ void raise_maxima(Result& a, const float (&top)[2]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float kept = weight(a.m[c], top[c]);
    a.m[c] = top[c];
#pragma unroll
    for (int j = 0; j < 3; ++j) a.sums[j][c] *= kept, a.sums[j][c + 2] *= kept;
  }
}

// Adds the unit's weighted values, of the warp's dimensions.
template <typename Cache>
__device__ __forceinline__ void add_values(Result& a, const Exchange& from, const Header& h, uint32_t tile, int warp,
                                           int lane) {
  using F = Fragments<Cache>;
  constexpr uint32_t ones[4] = {F::ones, F::ones, F::ones, F::ones};
  float m[2][CONSUMERS], top[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float4 x = *reinterpret_cast<const float4*>(from.maxima[lane % 4 * 2 + c]);
    m[c][0] = x.x, m[c][1] = x.y, m[c][2] = x.z, m[c][3] = x.w;
    top[c] = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
  }
  const bool raised = __any_sync(~0u, top[0] > a.m[0] || top[1] > a.m[1]);
  if (!raised && h.valid == UNIT) {
#pragma unroll
    for (int block = 0; block < UNIT / 16; ++block) {
      uint32_t v[2][4];
      F::load_values(v, tile, block, warp, lane);
      const uint2 weights = from.weights[block][lane];
      F::multiply(a.sums[0], v[0], weights);
      F::multiply(a.sums[1], v[1], weights);
      F::multiply(a.sums[2], ones, weights);
    }
    return;
  }
  raise_maxima(a, top);
#pragma unroll
  for (int block = 0; block < UNIT / 16; ++block) {
    if (block * 16 >= h.valid) break;
    uint32_t v[2][4], keep[2];  // rows that hold no key may be NaNs
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = block * 16 + i * 8 + lane % 4 * 2;
      keep[i] = (key < h.valid ? 0xFFFFu : 0u) | (key + 1 < h.valid ? 0xFFFF0000u : 0u);
    }
    F::load_values(v, tile, block, warp, lane);
    const uint2 weights = from.weights[block][lane];
    float part[3][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      v[j][0] &= keep[0], v[j][1] &= keep[0], v[j][2] &= keep[1], v[j][3] &= keep[1];
      F::multiply(part[j], v[j], weights);
    }
    F::multiply(part[2], ones, weights);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float scale = weight(m[c % 2][block], top[c % 2]);
#pragma unroll
      for (int j = 0; j < 3; ++j) a.sums[j][c] += scale * part[j][c];
    }
  }
}

// ---- a stream's end ----------------------------------------------------------------------------------------------

// Calls visit(c, offset in a slot's results, j, half) for the lane's elements in heads that are there.
template <typename Cache, typename Visit>
__device__ __forceinline__ void each_element(int group, int warp, int lane, Visit visit) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int head = lane % 4 * 2 + c;
    if (head >= group) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(c, head * HEAD_DIM + Fragments<Cache>::dimension(j, half, warp, lane), j, half);
      }
    }
  }
}

// Adds what the stream's query attended before the keys of its page table; a row of padding has nothing of it.
template <typename Cache>
__device__ __forceinline__ void add_before(const DecodeArguments& g, const Header& h, Result& a, int warp, int lane) {
  const int heads[2] = {min(lane % 4 * 2, g.group - 1), min(lane % 4 * 2 + 1, g.group - 1)};
  const int of_part = g.rows * g.kv_heads * g.group, first = (h.row * g.kv_heads + h.head) * g.group;
  float top[2] = {a.m[0], a.m[1]};
#pragma unroll 4
  for (int part = 0; part < g.parts; ++part) {
#pragma unroll
    for (int c = 0; c < 2; ++c) top[c] = fmaxf(top[c], load_float(g.before_lse + part * of_part + first + heads[c]));
  }
  raise_maxima(a, top);
#pragma unroll 4
  for (int part = 0; part < g.parts; ++part) {
    const int64_t at_part = static_cast<int64_t>(part) * of_part + first;
    float w[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      w[c] = weight(load_float(g.before_lse + at_part + heads[c]), top[c]);
      a.sums[2][c] += w[c];
    }
    each_element<Cache>(g.group, warp, lane, [&](int c, int at, int j, int half) {
      a.sums[j][c + 2 * half] += w[c] * load_float(g.before + at_part * HEAD_DIM + at);
    });
  }
}

// Writes the stream's result. `a` need not be normalised. BEFORE: steps may come with results of keys before.
template <typename Cache, bool BEFORE>
__device__ __forceinline__ void write_output(const DecodeArguments& g, const Header& h, Result& a, int warp, int lane) {
  if (BEFORE && g.parts > 0) add_before<Cache>(g, h, a, warp, lane);
  float o[2][4];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float sum = a.sums[2][c], scale = g.v_scale != nullptr ? g.v_scale[h.head] : 1.0f;
    const int head = min(lane % 4 * 2 + c, g.group - 1);
    if (g.sinks != nullptr) {
      const float sink = g.sinks[h.head * g.group + head] * LOG2E, top = fmaxf(a.m[c], sink);
      const float kept = weight(a.m[c], top);
      sum = sum * kept + exp2_approx(sink - top);
      scale *= kept;
    }
    scale = sum > 0.0f ? scale / sum : 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) o[j][c] = a.sums[j][c] * scale, o[j][c + 2] = a.sums[j][c + 2] * scale;
  }
  __nv_bfloat16* out = g.out + static_cast<int64_t>(h.row) * g.out_stride + h.head * g.group * HEAD_DIM;
  Fragments<Cache>::store(out, o, g.group, warp, lane);
}

// Which of a share's two slots of partial results its part of the stream lies in.
__device__ __forceinline__ int partial_slot(int share, const Header& h) {
  return 2 * share + (share == h.first_share && h.flags & STARTS ? 1 : 0);
}

// Leaves this share's normalised result in memory.
template <typename Cache>
__device__ __forceinline__ void leave_partial(const DecodeArguments& g, const Header& h, const Result& a, int warp,
                                              int lane) {
  const int slot = partial_slot(h.share, h);
  float* own = g.partial + static_cast<int64_t>(slot) * g.group * HEAD_DIM;
  const float (&sums)[4] = a.sums[2];
  const float inverse[2] = {sums[0] > 0.0f ? 1.0f / sums[0] : 0.0f, sums[1] > 0.0f ? 1.0f / sums[1] : 0.0f};
  each_element<Cache>(g.group, warp, lane,
                      [&](int c, int at, int j, int half) { own[at] = a.sums[j][c + 2 * half] * inverse[c]; });
  if (warp != 0 || lane >= 4) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float lse = sums[c] > 0.0f ? a.m[c] + log2f(sums[c]) : -INFINITY;
    if (lane * 2 + c < g.group) g.partial_lse[slot * g.group + lane * 2 + c] = lse;
  }
}

// The sum of all shares of a stream, in their order, as a result.
template <typename Cache>
__device__ __forceinline__ void add_shares(const DecodeArguments& g, const Header& h, Result& a, int warp, int lane) {
  a.reset();
  const int heads[2] = {min(lane % 4 * 2, g.group - 1), min(lane % 4 * 2 + 1, g.group - 1)};
#pragma unroll 4
  for (int share = h.first_share; share <= h.last_share; ++share) {
    const float* lse = g.partial_lse + partial_slot(share, h) * g.group;
#pragma unroll
    for (int c = 0; c < 2; ++c) a.m[c] = fmaxf(a.m[c], load_float(lse + heads[c]));
  }
#pragma unroll 4
  for (int share = h.first_share; share <= h.last_share; ++share) {
    const int64_t slot = static_cast<int64_t>(partial_slot(share, h)) * g.group;
    float w[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      w[c] = weight(load_float(g.partial_lse + slot + heads[c]), a.m[c]);
      a.sums[2][c] += w[c];
    }
    each_element<Cache>(g.group, warp, lane, [&](int c, int at, int j, int half) {
      a.sums[j][c + 2 * half] += w[c] * load_float(g.partial + slot * HEAD_DIM + at);
    });
  }
}

// Arrives at the streams that this share has part of, its first and its last (none: first_share is last_share), and
// writes those that it is the last to arrive at.
template <typename Cache, bool BEFORE>
__device__ __forceinline__ void combine_shares(const DecodeArguments& g, const Header (&open)[2], Result& a, int* last,
                                               int warp, int lane) {
  named_barrier(1, CONSUMER_THREADS);  // puts all partial results before the one thread's release
  if (threadIdx.x < 2) {
    const bool first = threadIdx.x == 0;
    const int row = first ? open[0].row : open[1].row, head = first ? open[0].head : open[1].head;
    const int others = first ? open[0].last_share - open[0].first_share : open[1].last_share - open[1].first_share;
    int* arrivals = g.arrivals + row * g.kv_heads + head;
    const bool is_last = others > 0 && atomic_add_acq_rel(arrivals, 1) == others;
    if (is_last) *arrivals = 0;
    last[threadIdx.x] = is_last;
  }
  named_barrier(1, CONSUMER_THREADS);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!last[i]) continue;
    add_shares<Cache>(g, open[i], a, warp, lane);
    write_output<Cache, BEFORE>(g, open[i], a, warp, lane);
  }
}

// A kernel without tiles.
struct NoTiles {
  static constexpr bool any = false;
  __device__ __forceinline__ void take(const Header&, int&, uint32_t&) const {}
};

// Takes what the producer sends until it says stop. `tiles` takes the tiles of prefill queries.
template <typename Cache, typename Tiles>
__device__ __forceinline__ void consume(const DecodeArguments& g, const DecodeRing<Cache>& ring, const Tiles& tiles,
                                        int warp, int lane) {
  Result a;
  Fragments<Cache> f;
  Header open[2] = {};
  int stage = 0, turn = 0;
  uint32_t parity = 0;
  float qk_scale = g.scale_log2;
  grid_dependency_wait();
  while (true) {
    mbarrier_wait(ring.full + 8 * stage, parity);
    const int4* fields = reinterpret_cast<const int4*>(ring.headers + stage * HEADER_INTS);
    const int4 x = fields[0], y = fields[1];
    const Header h{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    if (Tiles::any && h.flags & TILE) {
      tiles.take(h, stage, parity);
      // A tile comes between shares: nothing of them has to live through it.
      a.reset();
      f = {};
      open[0] = open[1] = {};
      qk_scale = g.scale_log2;
      continue;
    }
    if (h.flags & FIRST) {
      a.reset();
      f.load_queries(ring.q + stage * ring.q_bytes, g.group, lane);
      if (g.k_scale != nullptr) qk_scale = g.scale_log2 * g.k_scale[h.head];
    }
    if (h.valid > h.low) {
      Exchange& exchange = ring.exchange[turn];
      const uint32_t tile = ring.data_address + stage * DecodeRing<Cache>::stage_bytes;
      weigh_keys(a, f, exchange, h, tile, qk_scale, g.softcap, warp, lane);
      named_barrier(1, CONSUMER_THREADS);
      add_values<Cache>(a, exchange, h, tile + DecodeRing<Cache>::tile_bytes, warp, lane);
      turn ^= 1;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty + 8 * stage);
    if (h.flags & LAST) {
      if (h.first_share == h.last_share) {
        write_output<Cache, !Tiles::any>(g, h, a, warp, lane);
      } else {
        leave_partial<Cache>(g, h, a, warp, lane);
        if (h.share == h.first_share) {
          open[1] = h;
        } else {
          open[0] = h;
        }
      }
    }
    if (h.flags & END) {
      if (open[0].last_share > open[0].first_share || open[1].last_share > open[1].first_share) {
        combine_shares<Cache, !Tiles::any>(g, open, a, ring.last, warp, lane);
        open[0] = open[1] = {};
      }
      if (h.flags & STOP) return;
    }
    if (++stage == g.stages) stage = 0, parity ^= 1;
  }
}

}  // namespace stoker
