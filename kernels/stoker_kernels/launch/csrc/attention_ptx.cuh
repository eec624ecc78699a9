// PTX that attention needs besides ptx.cuh: a transposed fragment, bulk copies.
#pragma once
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace stoker {

// ---- matrix fragments --------------------------------------------------------------------------------------------

// Transposes an 8x8 matrix of 16-bit values held as an accumulator fragment, so that it becomes a B fragment.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Half of a named barrier: counts this thread, and does not wait.
template <int id>
__device__ __forceinline__ void named_barrier_arrive(int threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(id), "r"(threads) : "memory");
}

// Registers of each thread of a warpgroup from here on.
template <int count>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Matrix descriptor of B with N contiguous, in 128-byte swizzle: rows of 64 columns, one per k; groups of 8 rows are
// 1024 bytes apart, the next 64 columns `columns_apart` bytes. A step of 16 along K adds 128 to the descriptor.
__device__ __forceinline__ uint64_t wgmma_descriptor_columns(uint32_t address, uint32_t columns_apart) {
  const uint64_t stride_groups = 1024 >> 4, swizzle_128 = 1, leading = columns_apart >> 4;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (leading << 16) | (stride_groups << 32) | (swizzle_128 << 62);
}

// A box of a 3-D map: [outer][middle][inner], inner 128 bytes.
__device__ __forceinline__ void tensor_load_3d(uint32_t destination, const void* map, int inner, int middle, int outer,
                                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(destination),
      "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier)
      : "memory");
}

// ---- memory ------------------------------------------------------------------------------------------------------

// As load_int.
__device__ __forceinline__ float load_float(const float* address) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

// 16 bytes that are not kept in L1.
__device__ __forceinline__ uint4 load_once_16(const unsigned char* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ int atomic_add_acq_rel(int* address, int value) {
  int old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

// Copies `bytes` (a multiple of 16) of contiguous memory to shared memory; counted by the barrier.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace stoker
