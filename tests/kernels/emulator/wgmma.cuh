// csrc/wgmma.cuh and the wgmma part of csrc/ptx.cuh: a product is done when its warpgroup waits for it, from what shared
// memory holds then.
#pragma once
#include <type_traits>

#include "cuda_fp16.h"
#include "ptx.cuh"

namespace stoker {

struct e4m3 {};
struct s8 {};

inline uint64_t wgmma_descriptor(uint32_t address) { return (address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::fiber->products.emplace_back(); }
template <int count> void wgmma_results(float (&)[count]) {}
template <int count> void wgmma_results(int32_t (&)[count]) {}

inline float from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7F) == 0x7F) return NAN;
  const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
  return x & 0x80 ? -size : size;
}

// Reads `lines` × 32 bytes of an operand in 128-byte swizzle, K contiguous: 16 values, or 32 of a byte.
inline void read_operand(uint64_t descriptor, int lines, const emulator::Product& of, float* values) {
  const uint32_t base = (descriptor & 0x3FFF) << 4, groups = (descriptor >> 32 & 0x3FFF) << 4;
  for (int line = 0; line < lines; ++line) {
    for (int half = 0; half < 2; ++half) {
      uint16_t chunk[8];
      std::memcpy(chunk, emulator::shared(swizzled(base + line / 8 * groups + line % 8 * 128 + half * 16)), 16);
      for (const uint16_t two : chunk) {
        if (of.s8) {
          *values++ = static_cast<int8_t>(two & 255);
          *values++ = static_cast<int8_t>(two >> 8);
        } else if (of.e4m3) {
          *values++ = from_e4m3(two & 255);
          *values++ = from_e4m3(two >> 8);
        } else {
          *values++ = of.f16 ? from_f16(two) : from_bf16(two);
        }
      }
    }
  }
}

// Reads 16 × `columns` values of an operand in 128-byte swizzle whose columns are contiguous, 64 to a row of 128 bytes.
inline void read_columns(uint64_t descriptor, int columns, bool f16, float* values) {
  const uint32_t base = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t groups = (descriptor >> 32 & 0x3FFF) << 4;
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < columns; column += 8) {
      uint16_t chunk[8];
      const uint32_t at = base + column / 64 * leading + k / 8 * groups + k % 8 * 128 + column % 64 * 2;
      std::memcpy(chunk, emulator::shared(swizzled(at)), 16);
      for (const uint16_t each : chunk) *values++ = f16 ? from_f16(each) : from_bf16(each);
    }
  }
}

// One product of a warpgroup whose threads hold `products[t]`; thread t's sums are rows 16 · warp + lane / 4 (+ 8).
inline void multiply_now(const std::vector<const emulator::Product*>& products) {
  const emulator::Product& p = *products[0];
  static float a[64 * 32], b[256 * 32], across[32 * 256], sums[64 * 256];
  const int n = p.columns, depth = p.e4m3 || p.s8 ? 32 : 16;
  read_operand(p.a, 64, p, a);
  if (p.by_columns) {
    read_columns(p.b, n, p.f16, across);
  } else {
    read_operand(p.b, n, p, b);
    for (int column = 0; column < n; ++column) {
      for (int k = 0; k < depth; ++k) across[k * n + column] = b[column * depth + k];
    }
  }
  const auto exchange = [&](bool store) {
    for (int t = 0; t < 128; ++t) {
      for (int i = 0; i < n / 2; ++i) {
        const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
        float &mine = products[t]->sums[i], &there = sums[row * n + column];
        if (p.s8) {  // 32 products are exact in a float, all of K are not
          if (store) mine = bits<float>((p.accumulate ? bits<int32_t>(mine) : 0) + static_cast<int32_t>(there));
          if (!store) there = 0.0f;
        } else {
          store ? mine = there : there = p.accumulate ? mine : 0.0f;
        }
      }
    }
  };
  exchange(false);
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < depth; ++k) {
      const float x = a[row * depth + k];
      for (int column = 0; column < n; ++column) sums[row * n + column] += x * across[k * n + column];
    }
  }
  exchange(true);
}

// The products of the warpgroup's oldest groups, whose last thread has come to wait for them.
inline void multiply_group(int first_thread, int pending) {
  auto& fibers = emulator::cta->fibers;
  while (fibers[first_thread].products.size() > static_cast<size_t>(pending) + 1) {
    const size_t count = fibers[first_thread].products.front().size();
    for (size_t i = 0; i < count; ++i) {
      std::vector<const emulator::Product*> same;
      for (int t = first_thread; t < first_thread + 128; ++t) {
        if (fibers[t].products.front().size() != count) emulator::fail("a warpgroup that disagrees on its products");
        same.push_back(&fibers[t].products.front()[i]);
        if (!same.back()->same(*same[0])) emulator::fail("a warpgroup that disagrees on a product");
      }
      if (same[0]->own) {
        for (const auto* each : same) each->own();
      } else {
        multiply_now(same);
      }
    }
    for (int t = first_thread; t < first_thread + 128; ++t) fibers[t].products.erase(fibers[t].products.begin());
  }
}

template <int pending>
void wgmma_wait() {
  const int group = threadIdx.x / 128, key = 12900 + group;
  if (emulator::cta->barriers[key].arrived == 127) multiply_group(group * 128, pending);
  emulator::rendezvous(key, 128);
}

// Element (line of N, k) of B, with its N columns contiguous or K contiguous.
inline uint16_t operand_16(uint64_t descriptor, int line, int k, bool columns) {
  const uint32_t base = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t groups = (descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t at = columns ? line / 64 * leading + k / 8 * groups + k % 8 * 128 + line % 64 * 2
                              : line / 8 * groups + line % 8 * 128 + k * 2;
  return shared_16(swizzled(base + at));
}

template <typename T, int N>
struct Wgmma {
  static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::fiber->products.back().push_back(
        {d, a, b, N, accumulate, std::is_same_v<T, e4m3>, std::is_same_v<T, __half>, false, nullptr});
  }
};

template <int N>
struct Wgmma<s8, N> {
  static_assert(N == 8 || N == 24 || N % 16 == 0, "no instruction has so many columns");
  static void multiply(int32_t (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::fiber->products.back().push_back(
        {reinterpret_cast<float*>(d), a, b, N, accumulate, false, false, false, nullptr, true});
  }
};

template <typename T, int N>
struct WgmmaColumns {
  static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::fiber->products.back().push_back({d, a, b, N, accumulate, false, std::is_same_v<T, __half>, true, nullptr});
  }
};

template <typename T, int N, bool columns>
struct WgmmaRegisters {
  static void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    struct Fragment {
      uint32_t a[4];
    };
    const auto all = emulator::gather(Fragment{{a[0], a[1], a[2], a[3]}}, 32);
    float* sums = d;
    const int lane = emulator::lane();
    const auto number = [](uint16_t x) { return std::is_same_v<T, __half> ? from_f16(x) : from_bf16(x); };
    const auto product = [=] {
      for (int i = 0; i < N / 2; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = accumulate ? sums[i] : 0.0f;
        for (int k = 0; k < 16; ++k) {
          const uint32_t pair = all[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8];
          sum += number(static_cast<uint16_t>(pair >> 16 * (k % 2))) * number(operand_16(b, column, k, columns));
        }
        sums[i] = sum;
      }
    };
    emulator::fiber->products.back().push_back({d, 0, b, N, accumulate, false, std::is_same_v<T, __half>, columns, product});
  }
};

}  // namespace stoker
