// The functions of csrc/ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "cuda.h"
#include "cuda_bf16.h"
#include "warp.h"

namespace stoker {

inline uint32_t shared_address(const void* p) {
  return emulator::SHARED_BASE + static_cast<uint32_t>(static_cast<const unsigned char*>(p) - raw);
}
inline void launch_dependents() {}
inline void grid_dependency_wait() { emulator::wait_while(emulator::predecessor.done, -1, 0); }
inline uint64_t policy_evict_first() { return 1; }
inline uint64_t policy_evict_last() { return 2; }
inline uint64_t policy_evict_normal() { return 3; }
inline void prefetch_l1(const void*) {}
inline void keep_loads_behind() {}
inline void prefetch_l2(const void* p, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % 16 || bytes % 16) emulator::fail("a misaligned prefetch");
}
inline int load_int(const int* p) { return *p; }
inline uint16_t load_half(const uint16_t* p) { return *p; }
inline int4 load_int4(const int* p) { return {p[0], p[1], p[2], p[3]}; }
inline void wait_for_word(const int* p, int value) {
  while (*p != value) emulator::yield();
}
inline void release_word(int* p, int value) { *p = value; }
inline bool last_of(int* p, int all) {
  *p = *p == all - 1 ? 0 : *p + 1;
  return *p == 0;
}
inline void copy_async_16(void* to, const void* from, bool there) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a misaligned copy");
  // Some land at once, over what others may still read, the others when they are waited for.
  const emulator::Copy copy{to, from, there};
  emulator::pick() % 2 ? copy.land() : emulator::fiber->copies.push_back(copy);
}
inline void copy_async_16(uint32_t to, const void* from, bool there) {
  copy_async_16(emulator::shared(to), from, there);
}
inline void copies_wait() {
  for (const emulator::Copy& copy : emulator::fiber->copies) copy.land();
  emulator::fiber->copies.clear();
}
inline void named_barrier(int id, int threads) { emulator::rendezvous(10 + id, threads); }
inline void tensor_map_prefetch(const void*) {}
inline void proxy_fence_async() {}
inline void proxy_fence_async_global() {}
inline void proxy_fence_async_shared() {}

// ---- registers ---------------------------------------------------------------------------------------------------

// A warpgroup together; what nobody has given back cannot be taken.
inline void set_registers(int count, bool more) {
  emulator::rendezvous(12800 + threadIdx.x / 128, 128);
  const int change = count - emulator::fiber->registers;
  if (count % 8 || count < 24 || count > 256 || more != (change > 0)) emulator::fail("a wrong setmaxnreg");
  int& free = emulator::cta->free_registers;
  while (change > free) emulator::yield();
  free -= change;
  emulator::fiber->registers = count;
  emulator::cluster->progress = true;
}
template <int count> void registers_shrink() { set_registers(count, false); }
template <int count> void registers_grow() { set_registers(count, true); }

// ---- numbers -----------------------------------------------------------------------------------------------------

inline float from_bf16(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
inline float from_f16(uint16_t x) { return static_cast<float>(bits<_Float16>(x)); }
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  if (x != x) return 0x7FFF;
  return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline uint16_t to_f16(float x) { return bits<uint16_t>(static_cast<_Float16>(x)); }

inline float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

inline uint16_t f16_from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent == 0 ? mantissa / 512.0f : std::ldexp(1.0f + mantissa / 8.0f, exponent - 7);
  if (exponent == 15 && mantissa == 7) value = NAN;
  return to_f16(x & 128 ? -value : value);
}
inline uint32_t masked(uint32_t x, uint32_t y) { return x & y; }
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16; }
inline uint32_t pack_f16(float low, float high) { return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16; }
inline void unpack_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  low = f16_from_e4m3(x) | static_cast<uint32_t>(f16_from_e4m3(x >> 8)) << 16;
  high = f16_from_e4m3(x >> 16) | static_cast<uint32_t>(f16_from_e4m3(x >> 24)) << 16;
}

inline uint32_t to_e4m3(float x) {
  const uint32_t sign = std::signbit(x) ? 0x80u : 0u;
  const float size = std::fmin(std::fabs(x), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<uint32_t>(std::nearbyint(size * 0x1p9f));  // subnormal, or the least normal
  int exponent;
  const float fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  const auto eighths = static_cast<uint32_t>(std::nearbyint(fraction * 16.0f));  // 8…16; 16 carries into the exponent
  return sign | (static_cast<uint32_t>(exponent + 6) * 8 + (eighths - 8));
}
inline uint32_t e4m3_pair(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

// ---- arithmetic --------------------------------------------------------------------------------------------------

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }

// ---- matrix fragments --------------------------------------------------------------------------------------------

inline uint16_t shared_16(uint32_t address) {
  uint16_t x;
  std::memcpy(&x, emulator::shared(address), 2);
  return x;
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  if (address % 16) emulator::fail("a misaligned ldmatrix");
  const auto rows = emulator::gather(address, 32);
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    r[i] = 0;
    for (int half = 0; half < 2; ++half) {
      int row = lane / 4, column = lane % 4 * 2 + half;
      if (transposed) std::swap(row, column);
      r[i] |= static_cast<uint32_t>(shared_16(rows[8 * i + row] + 2 * column)) << 16 * half;
    }
  }
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, true); }
template <typename Convert>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Convert convert) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto all = emulator::gather(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, 32);
  for (int c = 0; c < 4; ++c) {
    const int row = emulator::lane() / 4 + c / 2 * 8, column = emulator::lane() % 4 * 2 + c % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t x = all[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8] >> 16 * (k % 2);
      const uint32_t y = all[column * 4 + k % 8 / 2].b[k / 8] >> 16 * (k % 2);
      d[c] += convert(static_cast<uint16_t>(x)) * convert(static_cast<uint16_t>(y));
    }
  }
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1, from_bf16);
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_m16n8k16_bf16(d, a, b[0], b[1]); }
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1, from_f16);
}

inline uint32_t transpose_matrix(uint32_t r) {
  const auto all = emulator::gather(r, 32);
  const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2;
  uint32_t transposed = 0;
  for (int half = 0; half < 2; ++half) {
    transposed |= (all[(column + half) * 4 + row / 2] >> 16 * (row % 2) & 0xFFFF) << 16 * half;
  }
  return transposed;
}

// Lane 8m + i has the address of row i of matrix m, which becomes column i of the fragment.
inline void stmatrix_x2_trans(uint32_t address, uint32_t r0, uint32_t r1) {
  struct Pair {
    uint32_t r[2];
  };
  const auto all = emulator::gather(Pair{{r0, r1}}, 32);
  const int lane = emulator::lane(), column = lane % 8;
  if (lane >= 16) return;
  if (address % 16) emulator::fail("a misaligned stmatrix");
  for (int row = 0; row < 8; ++row) {
    const auto x = static_cast<uint16_t>(all[row * 4 + column / 2].r[lane / 8] >> 16 * (column % 2));
    std::memcpy(emulator::shared(address + 2 * row), &x, 2);
  }
}

// ---- mbarrier ----------------------------------------------------------------------------------------------------

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  if (barrier % 8) emulator::fail("a misaligned mbarrier");
  emulator::cta->mbarriers[barrier] = {arrivals, arrivals, 0, 0};
  *reinterpret_cast<uint64_t*>(emulator::shared(barrier)) = emulator::MBARRIER_BYTES;
}
inline void mbarrier_init_fence() {}
inline void arrive_at(emulator::Mbarrier& b, uint32_t bytes) {
  b.bytes += bytes;
  if (b.bytes >= 1 << 20) emulator::fail("more bytes than a barrier counts");
  if (--b.pending < 0) emulator::fail("too many arrivals");
  emulator::complete(b);
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) { arrive_at(emulator::mbarrier(barrier), bytes); }
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect(barrier, 0); }
// Copies of before another such arrival may still be on their way.
inline void copies_arrive(uint32_t barrier) {
  emulator::Cta& to = *emulator::cta;
  emulator::mbarrier(to, barrier);
  auto copies = std::move(emulator::fiber->copies);
  emulator::fiber->copies.clear();
  emulator::cluster->copies.push_back([=, &to] {
    emulator::running(to);
    for (const emulator::Copy& copy : copies) copy.land();
    arrive_at(emulator::mbarrier(to, barrier), 0);
  });
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_while(emulator::mbarrier(barrier).phase, 1, static_cast<int>(parity));
}

// ---- clusters ----------------------------------------------------------------------------------------------------

inline int cluster_rank() { return emulator::cta->rank; }
inline int cluster_size() { return static_cast<int>(emulator::cluster->ctas.size()); }
inline void cluster_arrive() {
  emulator::aligned();
  emulator::Fiber& me = *emulator::fiber;
  if (me.waits_for_cluster) emulator::fail("a second arrival at the cluster's barrier without a wait");
  me.waits_for_cluster = true;
  me.cluster_generation = emulator::cluster->generation;
  ++emulator::cluster->arrived;
  emulator::cluster_check();
}
inline void cluster_wait() {
  emulator::aligned();
  emulator::Fiber& me = *emulator::fiber;
  if (!me.waits_for_cluster) emulator::fail("a wait at the cluster's barrier without an arrival");
  emulator::wait_while(emulator::cluster->generation, -1, me.cluster_generation);
  me.waits_for_cluster = false;
}
inline uint32_t cluster_address(uint32_t address, int rank) {
  return address | static_cast<uint32_t>(rank + 1) << emulator::RANK_SHIFT;
}
inline void cluster_sync() {
  if (cluster_size() == 1) emulator::fail("a barrier of a cluster of one");
  cluster_arrive();
  cluster_wait();
}
inline float4 read_peer(const float4* local, int rank) {
  emulator::Cta& from = *emulator::cluster->ctas[rank];
  emulator::running(from);
  if (shared_address(local) % 16) emulator::fail("a misaligned read of another CTA");
  float4 value;
  std::memcpy(&value, emulator::shared(from, shared_address(local)), 16);
  return value;
}
constexpr uint32_t LOCAL = (1u << emulator::RANK_SHIFT) - 1;
inline void mbarrier_arrive_cluster(uint32_t there) {
  emulator::Cta& to = emulator::owner(there);
  emulator::running(to);
  // It is on its way for a while; the barrier of the cluster does not wait for it.
  emulator::cluster->copies.push_back([=, &to] {
    emulator::running(to);
    arrive_at(emulator::mbarrier(to, there & LOCAL), 0);
  });
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) { mbarrier_wait(barrier, parity); }
inline void store_async(uint32_t there, float a, float b, float c, float d, uint32_t barrier) {
  emulator::Cta& to = emulator::owner(there);
  if (there % 16) emulator::fail("a misaligned st.async");
  if (cluster_size() == 1) emulator::fail("st.async outside a cluster");
  if (&to != &emulator::owner(barrier)) emulator::fail("data and barrier of st.async in two CTAs");
  emulator::running(to);
  emulator::copy_later(to, barrier & LOCAL, 16, [=, &to] {
    const float values[4] = {a, b, c, d};
    std::memcpy(emulator::shared(to, there & LOCAL), values, 16);
  });
}

inline void store_async(uint32_t there, int32_t a, int32_t b, int32_t c, int32_t d, uint32_t barrier) {
  store_async(there, bits<float>(a), bits<float>(b), bits<float>(c), bits<float>(d), barrier);
}

// ---- bulk tensor copies ------------------------------------------------------------------------------------------

// In the swizzle of lines of so many bytes: 32, 64 or 128.
inline uint32_t swizzled(uint32_t address, int line = 128) { return address ^ ((address >> 7 & (line / 16 - 1)) << 4); }

inline void land_row(emulator::Cta& to, const CUtensorMap& m, uint32_t at, const int64_t (&coordinates)[5]) {
  const unsigned char* row = m.base;
  bool inside = true;
  for (int d = 1; d < m.rank; ++d) {
    inside = inside && coordinates[d] >= 0 && coordinates[d] < m.sizes[d];
    row += coordinates[d] * m.strides[d];
  }
  const int line = static_cast<int>(m.box[0] * m.element_bytes);
  for (int chunk = 0; chunk < line / 16; ++chunk) {
    unsigned char* into = emulator::shared(to, swizzled(at + chunk * 16, line));
    const int64_t from = coordinates[0] * m.element_bytes + chunk * 16, bytes = m.sizes[0] * m.element_bytes;
    std::memset(into, 0, 16);
    if (inside && from >= 0 && from < bytes) std::memcpy(into, row + from, std::min<int64_t>(16, bytes - from));
  }
}

inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t) {
  if (destination % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) emulator::fail("a misaligned copy");
  emulator::Cta& to = *emulator::cta;
  emulator::copy_later(to, barrier, bytes, [=, &to] { std::memcpy(emulator::shared(to, destination), source, bytes); });
}

// A box of a line of bytes × rows, the second dimension fastest; rows outside are zero. The swizzle is one of addresses.
inline void load_box(emulator::Cta& to, uint32_t destination, const void* map, std::vector<int> first, uint32_t barrier) {
  const CUtensorMap m = *static_cast<const CUtensorMap*>(map);
  if (destination % 128) emulator::fail("a misaligned box");
  if (static_cast<int64_t>(first.size()) != m.rank) emulator::fail("coordinates that do not fit the map");
  int rows = 1;
  for (int d = 1; d < m.rank; ++d) rows *= static_cast<int>(m.box[d]);
  const int line = static_cast<int>(m.box[0] * m.element_bytes);
  emulator::copy_later(to, barrier, rows * line, [=, &to] {
    for (int i = 0; i < rows; ++i) {
      int64_t at[5] = {first[0]}, rest = i;
      for (int d = 1; d < m.rank; ++d) {
        at[d] = first[d] + rest % m.box[d];
        rest /= m.box[d];
      }
      land_row(to, m, destination + i * line, at);
    }
  });
}
inline void tensor_load_2d(uint32_t destination, const void* map, int inner, int outer, uint32_t barrier, uint64_t) {
  load_box(*emulator::cta, destination, map, {inner, outer}, barrier);
}
inline void tensor_load_4d(uint32_t destination, const void* map, int inner, int second, int third, int outer,
                           uint32_t barrier, uint64_t) {
  load_box(*emulator::cta, destination, map, {inner, second, third, outer}, barrier);
}
inline void multicast(uint32_t destination, const void* map, std::vector<int> first, uint32_t barrier, uint16_t ctas) {
  if (ctas >> cluster_size()) emulator::fail("a multicast beyond the cluster");
  for (int rank = 0; rank < cluster_size(); ++rank) {
    if (!(ctas >> rank & 1)) continue;
    emulator::running(*emulator::cluster->ctas[rank]);
    load_box(*emulator::cluster->ctas[rank], destination, map, first, barrier);
  }
}
inline void tensor_multicast_2d(uint32_t destination, const void* map, int inner, int outer, uint32_t barrier,
                                uint16_t ctas, uint64_t) {
  multicast(destination, map, {inner, outer}, barrier, ctas);
}
inline void tensor_multicast_4d(uint32_t destination, const void* map, int inner, int second, int third, int outer,
                                uint32_t barrier, uint16_t ctas, uint64_t) {
  multicast(destination, map, {inner, second, third, outer}, barrier, ctas);
}

}  // namespace stoker
