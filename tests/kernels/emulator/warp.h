// CUDA's variables and functions of a thread, on the emulator.
#pragma once
#include "emulator.h"

#define threadIdx (emulator::fiber->thread)
#define blockIdx (emulator::cta->block)
#define gridDim (emulator::grid)

inline void __syncthreads() { emulator::rendezvous(1, emulator::cta->fibers.size()); }
inline void __syncwarp() { emulator::aligned(); }
inline void __threadfence() {}
template <typename T> T __shfl_sync(unsigned, T x, int from) { return emulator::gather(x, 32)[from & 31]; }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) { return emulator::gather(x, 32)[emulator::lane() ^ mask]; }
template <typename T> T __shfl_up_sync(unsigned, T x, int by) {
  const int from = emulator::lane() - by;
  return emulator::gather(x, 32)[from < 0 ? emulator::lane() : from];
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const auto all = emulator::gather(x, 32);
  return *std::max_element(all.begin(), all.end());
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const auto all = emulator::gather(x, 32);
  return *std::min_element(all.begin(), all.end());
}
inline unsigned __match_any_sync(unsigned, int x) {
  unsigned same = 0;
  const auto all = emulator::gather(x, 32);
  for (int i = 0; i < 32; ++i) same |= static_cast<unsigned>(all[i] == x) << i;
  return same;
}
inline int atomicAdd(int* p, int value) {
  const int old = *p;
  *p += value;
  return old;
}
inline unsigned atomicOr(unsigned* p, unsigned value) {
  const unsigned old = *p;
  *p |= value;
  return old;
}
inline int atomicMin(int* p, int value) {
  const int old = *p;
  *p = min(old, value);
  return old;
}
inline int atomicMax(int* p, int value) {
  const int old = *p;
  *p = max(old, value);
  return old;
}
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned ballot = 0;
  const auto all = emulator::gather<int>(x, 32);
  for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(all[i] != 0) << i;
  return ballot;
}
inline bool __any_sync(unsigned, bool x) {
  bool any = false;
  for (const int y : emulator::gather<int>(x, 32)) any |= y != 0;
  return any;
}
