// How many elements of a type make one 128-byte chunk of a row, what their products are summed in, and whether these are to
// be scaled.
#pragma once
#include "wgmma.cuh"

namespace stoker {

template <typename T>
struct Chunk;
template <>
struct Chunk<__nv_bfloat16> {
  using Sum = float;
  static constexpr int elements = 64;
  static constexpr bool scaled = false;
};
template <>
struct Chunk<e4m3> {
  using Sum = float;
  static constexpr int elements = 128;
  static constexpr bool scaled = true;
};
template <>
struct Chunk<s8> {
  using Sum = int32_t;
  static constexpr int elements = 128;
  static constexpr bool scaled = true;
};

}  // namespace stoker
