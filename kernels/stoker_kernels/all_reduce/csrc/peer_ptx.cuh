// What kernels over several GPUs need of the machine beyond ptx.cuh: words that another GPU may write meanwhile.
#pragma once
#include "ptx.cuh"

namespace stoker {

// ---- memory that peers write -------------------------------------------------------------------------------------

// Four words, each read or written whole, in no order among themselves.
__device__ __forceinline__ uint4 load_shared_with_peers(const void* from) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_with_peers(void* to, uint4 x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// A word, behind which everything lies that a peer wrote before it.
__device__ __forceinline__ uint32_t load_word_of_peer(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Between two looks at a word that is not there yet.
__device__ __forceinline__ void look_again() {}

// ---- this GPU's own counters -------------------------------------------------------------------------------------

// Adds one to what the CTAs of a launch count; what each did before is seen by the one that counts last.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* at) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(at) : "memory");
  return old;
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float inverse_root(float x) { return __frsqrt_rn(x); }

}  // namespace stoker
