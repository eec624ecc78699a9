// A launch of a kernel on the emulator, behind a kernel that writes x and reads what is to be written.
#pragma once
#include "emulator.h"

struct Launch {
  int ctas, cluster, threads, seed;
  unsigned char* x;
  int64_t x_bytes;
  const unsigned char* out;
  int64_t out_bytes;
  unsigned char* words;  // further memory that the kernel before writes, as `shrunk`
  int64_t words_bytes;
  unsigned char* shrunk;
  int64_t shrunk_bytes;
};

inline void run(const Launch* l, std::function<void()> kernel) {
  emulator::predecessor.writes.clear();
  const emulator::Region written[] = {{l->x, l->x_bytes}, {l->words, l->words_bytes}, {l->shrunk, l->shrunk_bytes}};
  for (const emulator::Region& each : written) {
    if (each.bytes) emulator::predecessor.writes.push_back(each);
  }
  emulator::predecessor.out = l->out, emulator::predecessor.out_bytes = l->out_bytes;
  emulator::run_grid(l->ctas, l->threads, l->seed, kernel, l->cluster);
}
