// Names for the PTX that kernels of weights in fragments use beside ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace stoker {

// Half bytes i and i + 4 of a word → the bf16 pair 128 + code, which is exact.
__device__ __forceinline__ uint32_t raised(uint32_t word, int i) {
  uint32_t pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word >> (4 * i)), "r"(0x000F000Fu), "r"(0x43004300u));
  return pair;
}

// Weights are read once: they must not push x out of L1.
__device__ __forceinline__ uint4 stream(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

}  // namespace stoker
