// What a tensor map of boxes of 32, 64 or 128 bytes holds, in place of the driver's opaque one.
#pragma once
#include <cstdint>

struct CUtensorMap {
  unsigned char* base;
  int64_t rank, element_bytes;
  int64_t sizes[5], strides[5], box[5];  // innermost first; strides in bytes, box and sizes in elements
};
