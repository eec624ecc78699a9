// Partition by clusters: tiles are dealt to clusters in contiguous runs that differ by at most one tile; the CTAs of a
// cluster take whole tiles in turn, and share what is left over (at most one tile) by cutting its K into equal parts.
// `stoker_kernels/gemm/cluster_split.py` is the same arithmetic in Python, tested exhaustively; change both together.
// The cut depends on (tiles, k_blocks, clusters, cluster size) alone, never on the number of tokens.
#pragma once
#include <stdint.h>

namespace stoker {

struct ClusterSplit {
  int begin, whole, shared;  // first tile of the cluster; whole tiles of each CTA; whether one tile is shared (0 or 1)
  int rank, size, k_blocks;

  struct Segment {
    int tile, begin, end;
  };

  __device__ ClusterSplit(int cluster, int clusters, int rank_, int size_, int tiles, int k_blocks_)
      : rank(rank_), size(size_), k_blocks(k_blocks_) {
    begin = cluster * tiles / clusters;
    const int count = (cluster + 1) * tiles / clusters - begin;
    whole = count / size;
    shared = count % size;
  }

  __device__ int segments() const { return shared + whole; }

  // The shared tile comes first, so that its sum hides behind whole tiles.
  __device__ Segment segment(int i) const {
    if (i < shared) return {begin + whole * size, rank * k_blocks / size, (rank + 1) * k_blocks / size};
    return {begin + (i - shared) * size + rank, 0, k_blocks};
  }

  __device__ int units() const {
    return whole * k_blocks + (shared ? (rank + 1) * k_blocks / size - rank * k_blocks / size : 0);
  }
};

// The units of a CTA, one by one, in the order of its segments.
struct ClusterWalk {
  const ClusterSplit& part;
  int index = 0;
  ClusterSplit::Segment segment;
  int k_block;

  __device__ explicit ClusterWalk(const ClusterSplit& part_)
      : part(part_), segment(part_.segment(0)), k_block(segment.begin) {}
  __device__ void next() {
    if (++k_block == segment.end) {
      segment = part.segment(++index);
      k_block = segment.begin;
    }
  }
};

}  // namespace stoker
