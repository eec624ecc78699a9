// The functions of csrc/int4_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "ptx.cuh"

namespace stoker {

inline uint32_t masked(uint32_t x, uint32_t y) { return x & y; }
inline uint32_t raised(uint32_t word, int i) { return (word >> (4 * i) & 0x000F000Fu) | 0x43004300u; }
inline uint4 stream(const uint4* address) { return *address; }
inline void cluster_sync() {
  if (cluster_size() == 1) emulator::fail("a barrier of a cluster of one");
  cluster_arrive();
  cluster_wait();
}
inline float4 read_peer(const float4* local, int rank) {
  emulator::Cta& from = *emulator::cluster->ctas[rank];
  emulator::running(from);
  float4 value;
  std::memcpy(&value, emulator::shared(from, shared_address(local)), 16);
  return value;
}
inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_m16n8k16_bf16(d, a, b[0], b[1]); }

}  // namespace stoker
