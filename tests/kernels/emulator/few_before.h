// Of kernels of experts for few tokens: the kernel before gate-up writes x and the plan or logits, the one before down its
// rows, and both may still read what these write.
#pragma once
#include "few_arguments.cuh"

// A row of x has so many numbers, one of the result `out_row`.
inline void few_before(const stoker::FewArguments& a, bool gated, int64_t x_row, int64_t out_row) {
  const auto region = [](const void* at, int64_t bytes) {
    return emulator::Region{const_cast<unsigned char*>(static_cast<const unsigned char*>(at)), bytes};
  };
  const int pairs = a.tokens * a.top_k, x_rows = gated ? a.tokens : pairs;
  auto& before = emulator::predecessor;
  before.writes = {region(a.x, ((x_rows - 1) * static_cast<int64_t>(a.ld_x) + x_row) * 2)};
  if (gated && a.logits != nullptr) {
    before.writes.push_back(region(a.logits, (static_cast<int64_t>(a.tokens - 1) * a.ld_logits + a.experts) * 2));
  } else if (gated) {
    before.writes.push_back(region(a.order, pairs * 4));
    before.writes.push_back(region(a.tiles, a.num_tiles * 12));
  }
  before.out = reinterpret_cast<const unsigned char*>(a.out);
  before.out_bytes = (gated ? pairs : a.tokens) * out_row * 2;
}
