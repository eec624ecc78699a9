// The functions of csrc/ptx.cuh and csrc/attention_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "cuda.h"
#include "cuda_bf16.h"
#include "emulator.h"

namespace stoker {

inline uint32_t shared_address(const void* p) {
  return emulator::SHARED_BASE + static_cast<uint32_t>(static_cast<const unsigned char*>(p) - raw);
}
inline void launch_dependents() {}
inline void grid_dependency_wait() {}
inline uint64_t policy_evict_first() { return 1; }
inline uint64_t policy_evict_last() { return 2; }
inline void named_barrier(int id, int threads) { emulator::rendezvous(10 + id, threads); }
template <int id> void named_barrier_arrive(int threads) { emulator::arrive(10 + id, threads); }
template <int> void registers_decrease() {}
template <int> void registers_increase() {}
inline void tensor_map_prefetch(const void*) {}
inline void proxy_fence_async() {}

// ---- numbers -----------------------------------------------------------------------------------------------------

inline float from_bf16(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
inline float from_f16(uint16_t x) { return static_cast<float>(bits<_Float16>(x)); }
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  if (x != x) return 0x7FFF;
  return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline uint16_t to_f16(float x) { return bits<uint16_t>(static_cast<_Float16>(x)); }
inline uint16_t f16_from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent == 0 ? mantissa / 512.0f : std::ldexp(1.0f + mantissa / 8.0f, exponent - 7);
  if (exponent == 15 && mantissa == 7) value = NAN;
  return to_f16(x & 128 ? -value : value);
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16; }
inline uint32_t pack_f16(float low, float high) { return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16; }
inline void unpack_e4m3(uint32_t x, uint32_t& low, uint32_t& high) {
  low = f16_from_e4m3(x) | static_cast<uint32_t>(f16_from_e4m3(x >> 8)) << 16;
  high = f16_from_e4m3(x >> 16) | static_cast<uint32_t>(f16_from_e4m3(x >> 24)) << 16;
}

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

inline uint32_t transpose_8x8(uint32_t x) {
  const auto all = emulator::gather(x, 32);
  uint32_t y = 0;
  for (int half = 0; half < 2; ++half) {
    const int row = emulator::lane() % 4 * 2 + half, column = emulator::lane() / 4;
    y |= (all[row * 4 + column / 2] >> 16 * (column % 2) & 0xFFFF) << 16 * half;
  }
  return y;
}

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
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1, from_f16);
}

// ---- memory ------------------------------------------------------------------------------------------------------

inline int load_int(const int* p) { return *p; }
inline float load_float(const float* p) { return *p; }
inline int4 load_int4(const int* p) { return {p[0], p[1], p[2], p[3]}; }
inline float4 load_float4(const float* p) { return {p[0], p[1], p[2], p[3]}; }
inline int atomic_add_acq_rel(int* p, int value) {
  const int old = *p;
  *p += value;
  return old;
}
inline void bulk_prefetch(const void* source, uint32_t bytes) {
  volatile unsigned char touched = static_cast<const unsigned char*>(source)[bytes - 1];
  (void)touched;
}

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  if (barrier % 8) emulator::fail("a misaligned mbarrier");
  emulator::cta->mbarriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  auto& b = emulator::mbarrier(barrier);
  b.bytes += bytes;
  if (--b.pending < 0) emulator::fail("too many arrivals");
  emulator::complete(b);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while ((emulator::mbarrier(barrier).phase & 1) == static_cast<int>(parity)) emulator::yield();
}

inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  if (destination % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) emulator::fail("a misaligned copy");
  emulator::copy_later(barrier, bytes, [=] { std::memcpy(emulator::shared(destination), source, bytes); });
}

inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// A box of 128 bytes × the map's rows; rows outside are zero. The swizzle is one of addresses.
inline void tensor_load_2d(uint32_t destination, const void* map, int inner, int outer, uint32_t barrier, uint64_t) {
  const CUtensorMap m = *static_cast<const CUtensorMap*>(map);
  if (destination % 128) emulator::fail("a misaligned box");
  emulator::copy_later(barrier, m.box_rows * 128, [=] {
    for (int row = 0; row < m.box_rows; ++row) {
      for (int chunk = 0; chunk < 8; ++chunk) {
        const uint32_t at = destination + row * 128 + chunk * 16;
        unsigned char* to = emulator::shared(swizzled(at));
        const int64_t from = static_cast<int64_t>(inner) * m.element_bytes + chunk * 16;
        if (outer + row < m.rows && outer + row >= 0 && from < m.row_bytes) {
          std::memcpy(to, m.base + (outer + row) * m.row_stride + from, 16);
        } else {
          std::memset(to, 0, 16);
        }
      }
    }
  });
}

inline void tensor_load_3d(uint32_t destination, const void* map, int inner, int middle, int outer, uint32_t barrier) {
  const CUtensorMap m = *static_cast<const CUtensorMap*>(map);
  if (destination % 1024) emulator::fail("a misaligned box");
  if (middle + m.box_rows > m.rows) emulator::fail("a box past the middle dimension");
  emulator::copy_later(barrier, m.box_outer * m.box_rows * 128, [=] {
    for (int i = 0; i < m.box_outer * m.box_rows; ++i) {
      const int64_t row = middle + i % m.box_rows, plane = outer + i / m.box_rows;
      for (int chunk = 0; chunk < 8; ++chunk) {
        unsigned char* to = emulator::shared(swizzled(destination + i * 128 + chunk * 16));
        const unsigned char* from = m.base + plane * m.outer_stride + row * m.row_stride + inner * m.element_bytes;
        plane < m.outer ? std::memcpy(to, from + chunk * 16, 16) : std::memset(to, 0, 16);
      }
    }
  });
}

// ---- wgmma: a product is done when it is waited for, from what shared memory holds then -------------------------

inline uint64_t wgmma_descriptor(uint32_t address) { return (address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
inline uint64_t wgmma_descriptor_columns(uint32_t address, uint32_t apart) {
  return (address >> 4) | static_cast<uint64_t>(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::fiber->products.emplace_back(); }
template <int pending>
void wgmma_wait() {
  emulator::rendezvous(12900 + threadIdx.x / 128, 128);
  auto& groups = emulator::fiber->products;
  while (groups.size() > pending + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}
template <int count> void wgmma_results(float (&)[count]) {}

inline float operand(uint64_t descriptor, int line, int k, bool columns) {
  const uint32_t base = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t groups = (descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t at = columns ? line / 64 * leading + k / 8 * groups + k % 8 * 128 + line % 64 * 2
                              : line / 8 * groups + line % 8 * 128 + k * 2;
  return from_bf16(shared_16(swizzled(base + at)));
}

template <int count, typename A>
void multiply_later(float (&d)[count], A a, uint64_t b, bool columns, bool accumulate) {
  float* result = d;
  const int lane = emulator::lane(), warp = emulator::warp() % 4;
  emulator::fiber->products.back().push_back([=] {
    for (int i = 0; i < count; ++i) {
      const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = accumulate ? result[i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += a(row, k) * operand(b, column, k, columns);
      result[i] = sum;
    }
  });
}

template <typename T, int N>
struct Wgmma {
  static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    multiply_later(d, [=](int row, int k) { return operand(a, row, k, false); }, b, false, accumulate);
  }
};

template <int N>
struct WgmmaRegisters {
  static void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    struct Fragment {
      uint32_t a[4];
    };
    const auto all = emulator::gather(Fragment{{a[0], a[1], a[2], a[3]}}, 32);
    const auto element = [=](int row, int k) {
      return from_bf16(all[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8 % 2] >> 16 * (k % 2));
    };
    multiply_later(d, element, b, true, accumulate);
  }
};

}  // namespace stoker
