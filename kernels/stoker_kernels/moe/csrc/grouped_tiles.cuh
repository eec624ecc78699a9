// Which tiles a CTA of the kernels for many tokens takes, and where it keeps their operands.
#pragma once
#include "grouped_arguments.cuh"

namespace stoker {

// [stages of W and x][full][empty][places of the experts]
struct GroupedRing {
  static constexpr int w_bytes = GROUPED_ROWS * 128, x_bytes = GROUPED_TOKENS * 128, stage_bytes = w_bytes + x_bytes;
  uint32_t base, full, empty;
  int2* places;  // [experts]: first and end in the order

  __device__ GroupedRing(unsigned char* raw, int stages) {
    const uint32_t start = shared_address(raw);
    base = (start + 1023) & ~1023u;
    full = base + stages * stage_bytes;
    empty = full + 8 * stages;
    places = reinterpret_cast<int2*>(raw + (empty + 8 * stages - start));
  }
  __device__ uint32_t w(int stage) const { return base + stage * stage_bytes; }
  __device__ uint32_t x(int stage) const { return base + stage * stage_bytes + w_bytes; }
};

struct GroupedTile {
  int expert, row_block;
  int first, count;  // places in the order; how many
};

// Every so-many-th tile of all, expert by expert. The tiles of an expert that have rows of the weight in common follow
// each other, so that CTAs read these together.
struct GroupedWalk {
  const GroupedArguments& a;
  const int2* places;
  int index, expert = 0, before = 0;  // `before`: tiles of the experts before
  GroupedTile tile;

  __device__ GroupedWalk(const GroupedArguments& arguments, const int2* of) : a(arguments), places(of), index(blockIdx.x) {}

  // The next tile, if there is one.
  __device__ __forceinline__ bool next() {
    while (expert < a.experts) {
      const int2 mine = places[expert];
      const int wide = (max(mine.y - mine.x, 0) + GROUPED_TOKENS - 1) / GROUPED_TOKENS, inside = index - before;
      if (inside < wide * a.row_blocks) {
        const int row_block = inside / wide, skipped = (inside - row_block * wide) * GROUPED_TOKENS;
        tile = {expert, row_block, mine.x + skipped, min(mine.y - mine.x - skipped, GROUPED_TOKENS)};
        index += gridDim.x;
        return true;
      }
      before += wide * a.row_blocks;
      ++expert;
    }
    return false;
  }
};

// A stage of the ring and the parity of its phase, one after the other.
struct GroupedStage {
  int at = 0;
  uint32_t parity;

  __device__ explicit GroupedStage(uint32_t first) : parity(first) {}
  __device__ __forceinline__ void step(int stages) {
    if (++at == stages) at = 0, parity ^= 1;
  }
};

}  // namespace stoker
