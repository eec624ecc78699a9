// Names for the PTX that kernels of GGUF's blocks use beside ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace stoker {

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

// x & mask | ones by one instruction, which has one constant: another stays in a register.
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t ones) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "r"(mask), "r"(ones));
  return result;
}

// `mma` of sums that start from 0.
__device__ __forceinline__ void mma_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}

// 16 bytes of a weight to shared memory, past L1 and not kept in L2; and a thread's copies in groups, all but the last
// `pending` of which are there after the wait.
__device__ __forceinline__ void copy_weight(uint32_t to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void copies_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 16 or 8 bytes of a weight to registers, in the same way; and of its scales, which neighbours read too.
__device__ __forceinline__ uint4 load_weight_16(const void* from, uint64_t policy) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from), "l"(policy));
  return value;
}
__device__ __forceinline__ uint2 load_weight_8(const void* from, uint64_t policy) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
               : "=r"(value.x), "=r"(value.y)
               : "l"(from), "l"(policy));
  return value;
}
__device__ __forceinline__ uint2 load_8(const void* from) { return __ldg(static_cast<const uint2*>(from)); }
__device__ __forceinline__ uint32_t load_4(const void* from) { return __ldg(static_cast<const uint32_t*>(from)); }

}  // namespace stoker
