// Names for the PTX that kernels of GGUF's blocks use beside ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace stoker {

// x & y: by hand, since the compiler turns masks of shifted words into more.
__device__ __forceinline__ uint32_t only(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("and.b32 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// The lower and the upper fp16 number of a register.
__device__ __forceinline__ float half_low(uint32_t pair) {
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(pair));
  return value;
}
__device__ __forceinline__ float half_high(uint32_t pair) {
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(value) : "r"(pair));
  return value;
}

// mma_m16n8k16_bf16 that the compiler may move, as nothing but its registers is touched.
__device__ __forceinline__ void block_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace stoker
