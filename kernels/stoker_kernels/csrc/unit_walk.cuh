// The order in which a CTA visits its units.
#pragma once
#include "stream_k.cuh"

namespace stoker {

// The units of a CTA, one by one, in the order of its segments.
struct UnitWalk {
  const StreamK& part;
  int index = 0;
  Segment segment;
  int k_block;

  __device__ explicit UnitWalk(const StreamK& part_) : part(part_), segment(part_.segment(0)), k_block(segment.begin) {}
  __device__ void next() {
    if (++k_block == segment.end && ++index < part.segments) {
      segment = part.segment(index);
      k_block = segment.begin;
    }
  }
};

}  // namespace stoker
