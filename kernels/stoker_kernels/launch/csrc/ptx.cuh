// Thin, typed names for the PTX that the kernels use: mbarriers, bulk copies, wgmma, launch control.
// Every asm that touches memory carries a "memory" clobber: without it the compiler moves it across its neighbours.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

namespace stoker {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- programmatic dependent launch -------------------------------------------------------------------------------

// Lets the next kernel of the stream start; it still waits for this grid's completion in grid_dependency_wait().
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns once every earlier kernel of the stream has finished and its writes are visible.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- cache policy ------------------------------------------------------------------------------------------------

// Weights are read once per launch: leave L2 to activations and the KV cache.
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t policy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The encoding of no preference. createpolicy makes another one of evict_normal, which demotes lines that others hold
// with a preference: it costs a request between the halves of L2 at every hit.
__device__ __forceinline__ uint64_t policy_evict_normal() { return 0x1000000000000000ull; }

// `bytes` in a row, a multiple of 16 as the address is.
__device__ __forceinline__ void prefetch_l2(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

__device__ __forceinline__ void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p) : "memory"); }

// The compiler brings no load that stands behind forward, and keeps none that stands before for another.
__device__ __forceinline__ void keep_loads_behind() { asm volatile("" ::: "memory"); }

// ---- loads past L1 ------------------------------------------------------------------------------------------------

// What is read before the wait for the previous kernel must not linger there.
__device__ __forceinline__ int load_int(const int* address) {
  int value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint16_t load_half(const uint16_t* address) {
  uint16_t value;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ int4 load_int4(const int* address) {
  int4 v;
  asm volatile("ld.global.cg.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// ---- words that grids wait for ------------------------------------------------------------------------------------

// Returns once `address` holds `value`; what was written before it is visible.
__device__ __forceinline__ void wait_for_word(const int* address, int value) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(address) : "memory");
  } while (found != value);
}

__device__ __forceinline__ void release_word(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Counts one of `all` that come; whether it is the last one, which starts the count anew.
__device__ __forceinline__ bool last_of(int* address, int all) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(all - 1) : "memory");
  return before == static_cast<unsigned>(all - 1);
}

// ---- copies by threads -------------------------------------------------------------------------------------------

// 16 bytes to shared memory, past L1; zeros where nothing is `there`. A thread sees its own after copies_wait().
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Arrives at a barrier, one of those that it waits for, once all copies of this thread up to here have landed.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- named barriers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier(int id, int threads) {
  // Constant ids: a barrier named at run time reserves all sixteen.
  switch (id) {
    case 1: asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); break;
    case 2: asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory"); break;
    case 3: asm volatile("bar.sync 3, %0;" ::"r"(threads) : "memory"); break;
    case 4: asm volatile("bar.sync 4, %0;" ::"r"(threads) : "memory"); break;
    case 5: asm volatile("bar.sync 5, %0;" ::"r"(threads) : "memory"); break;
    default: asm volatile("bar.sync 6, %0;" ::"r"(threads) : "memory"); break;
  }
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both halves of a register as fp32, and two numbers rounded to nearest even into one.
__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// x & y: by hand, since the compiler turns masks of shifted words into more.
__device__ __forceinline__ uint32_t masked(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("and.b32 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Rounded to nearest even, saturated at ±448.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four e4m3 values of a register: the lower two and the upper two as pairs of f16.
__device__ __forceinline__ void unpack_e4m3(uint32_t packed, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(packed));
}

// ---- matrix fragments --------------------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same, which the compiler may move, as nothing but its registers is touched.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8x8 matrix of 16-bit values that a warp holds, two neighbours of row lane/4 a lane.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t r) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
}

// Stores four 8x8 matrices of 16-bit values transposed: fragment column c becomes the 16-byte row at lane c's address.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r0), "r"(r1)
               : "memory");
}

// ---- mbarrier ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the completion of the phase with this parity; a fresh barrier's "previous" phase has parity 1.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra wait_done;\n"
      "bra wait_loop;\n"
      "wait_done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ int cluster_size() {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Every thread of the cluster arrives once; those that touch another CTA's shared memory wait before they do. An arrival
// publishes no writes (that would be a MEMBAR): it says that reads by wgmma are over, or that barriers are set up, which
// their own fence has published.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address, in CTA `rank` of the cluster, of what lies at `address` here.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// A barrier of every thread of the cluster, after which its writes are seen.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Four floats of another CTA's shared memory, at the place that `local` has here.
__device__ __forceinline__ float4 read_peer(const float4* local, int rank) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(cluster_address(shared_address(local), rank))
               : "memory");
  return value;
}

// Stores 16 bytes in another CTA's shared memory and counts them on `barrier`, which lies in the same CTA.
__device__ __forceinline__ void store_async(uint32_t there, float a, float b, float c, float d, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t there, int32_t a, int32_t b, int32_t c, int32_t d, uint32_t barrier) {
  store_async(there, __int_as_float(a), __int_as_float(b), __int_as_float(c), __int_as_float(d), barrier);
}

// Arrives on a barrier in any CTA of the cluster; `there` comes from cluster_address. Publishes no writes to that CTA:
// it says that reads by wgmma are over. (A release at the cluster's scope is a MEMBAR, a microsecond a k block.)
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// mbarrier_wait for writes that come from another CTA of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_loop:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra wait_done;\n"
      "bra wait_loop;\n"
      "wait_done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- bulk tensor copies ------------------------------------------------------------------------------------------

__device__ __forceinline__ void tensor_map_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tensor_load_2d(uint32_t destination, const void* map, int inner, int outer,
                                               uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tensor_load_4d(uint32_t destination, const void* map, int inner, int second, int third,
                                               int outer, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(inner), "r"(second), "r"(third), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
}

// `bytes` in a row, a multiple of 16 as both addresses are, counted on `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// tensor_load_2d into every CTA of `ctas` (a bit each), at the same offset, counted on each one's own barrier.
__device__ __forceinline__ void tensor_multicast_2d(uint32_t destination, const void* map, int inner, int outer,
                                                    uint32_t barrier, uint16_t ctas, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(destination),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tensor_multicast_4d(uint32_t destination, const void* map, int inner, int second, int third,
                                                    int outer, uint32_t barrier, uint16_t ctas, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(destination),
      "l"(map), "r"(inner), "r"(second), "r"(third), "r"(outer), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}

// Orders this thread's earlier generic-proxy view of memory before its later bulk copies: of all memory, which is a MEMBAR,
// or only of global memory, which is not and is enough after grid_dependency_wait(), or only of shared memory.
__device__ __forceinline__ void proxy_fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers ---------------------------------------------------------------------------------------------------

// A warpgroup gives registers back, or takes what others gave back: `count` a thread from here on.
template <int count>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- wgmma -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps uses of the accumulators behind the wait: to the compiler the wait does not touch them.
template <int count>
__device__ __forceinline__ void wgmma_results(float (&acc)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int count>
__device__ __forceinline__ void wgmma_results(int32_t (&acc)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(acc[i])::"memory");
}

// Matrix descriptor of a K-major tile in 128-byte swizzle: rows of 128 bytes, 8-row groups 1024 bytes apart. The tile
// starts on a multiple of 1024 bytes; a step of 32 bytes along K adds 2 to the descriptor.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  const uint64_t stride_groups = 1024 >> 4, swizzle_128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) | (stride_groups << 32) | (swizzle_128 << 62);
}


}  // namespace stoker
