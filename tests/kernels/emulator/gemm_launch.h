// A launch of a GEMM kernel on the emulator, behind a kernel that writes x and reads what is to be written.
#pragma once
#include "emulator.h"

struct Launch {
  int ctas, cluster, threads, seed;
  unsigned char* x;
  int64_t x_bytes;
  const unsigned char* out;
  int64_t out_bytes;
};

inline void run(const Launch* l, std::function<void()> kernel) {
  if (l->x_bytes) emulator::predecessor.writes = {{l->x, l->x_bytes}};
  emulator::predecessor.out = l->out, emulator::predecessor.out_bytes = l->out_bytes;
  emulator::run_grid(l->ctas, l->threads, l->seed, kernel, l->cluster);
}
