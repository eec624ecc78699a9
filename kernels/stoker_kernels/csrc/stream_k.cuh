// Stream-K partition: tiles × k_blocks units in one line, cut into equal contiguous ranges, one per CTA.
// `stoker_kernels/stream_k.py` is the same arithmetic in Python, tested exhaustively; change both together.
// There are never more CTAs than units: a CTA without units would be counted among those that share a tile.
// The cut depends on (tiles, k_blocks, CTAs) alone, never on the number of tokens: sums are batch-invariant.
#pragma once
#include <stdint.h>

namespace stoker {

// One CTA's share of one tile: k blocks [begin, end).
struct Segment {
  int tile, begin, end;
};

struct StreamK {
  int first, last;  // this CTA's units [first, last)
  int first_tile, segments;
  int tiles, k_blocks, ctas;

  __device__ StreamK(int cta, int ctas_, int tiles_, int k_blocks_) : tiles(tiles_), k_blocks(k_blocks_), ctas(ctas_) {
    first = begin_of(cta);
    last = begin_of(cta + 1);
    first_tile = first / k_blocks;
    segments = first == last ? 0 : (last - 1) / k_blocks - first_tile + 1;
  }

  __device__ int units() const { return tiles * k_blocks; }

  __device__ int begin_of(int cta) const { return static_cast<int>(static_cast<int64_t>(cta) * units() / ctas); }

  __device__ int cta_of(int unit) const {
    return static_cast<int>((static_cast<int64_t>(unit + 1) * ctas - 1) / units());
  }

  // Shared tiles (the first and the last of a CTA) come first, so that their sums hide behind whole tiles.
  __device__ Segment segment(int i) const {
    const int offset = i == 0 ? 0 : (i == 1 ? segments - 1 : i - 1);
    const int tile = first_tile + offset;
    const int start = tile * k_blocks;
    return {tile, max(first, start) - start, min(last, start + k_blocks) - start};
  }

  // A CTA has at most two shared tiles: slot 0 holds the one that its range begins in, slot 1 the one it ends in.
  __device__ int slot_of(int cta, int tile) const { return 2 * cta + (begin_of(cta) < tile * k_blocks ? 1 : 0); }
};

}  // namespace stoker
