// What a tensor map of 128-byte boxes holds, in place of the driver's opaque one. 3-D: `box_rows` of the middle dimension,
// `box_outer` of the outer one.
#pragma once
#include <cstdint>

struct CUtensorMap {
  unsigned char* base;
  int64_t rows, row_bytes, row_stride, box_rows, element_bytes, outer, outer_stride, box_outer;
};
