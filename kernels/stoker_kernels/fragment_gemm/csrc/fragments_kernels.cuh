// The kernels of one form of numbers in fragments; see fragments_few.cuh, fragments_wide.cuh, fragments_dequantize.cuh.
#pragma once
#include "fragments_dequantize.cuh"
#include "fragments_few.cuh"
#include "fragments_wide.cuh"

#define FRAGMENTS_FEW(STEM, NAME, TOKENS, ...)                                              \
  extern "C" __global__ void __launch_bounds__(256, 2)                                      \
      STEM##_few_m##TOKENS##_##NAME(const __grid_constant__ stoker::FragmentArguments p) { \
    stoker::fragments_few<__VA_ARGS__, TOKENS>(p);                                          \
  }
#define FRAGMENTS_DEQUANTIZE(STEM, NAME, ...)                                                                             \
  extern "C" __global__ void __launch_bounds__(256) STEM##_dequantize_##NAME(const __grid_constant__ stoker::FragmentArguments p) { \
    stoker::dequantize_fragments<__VA_ARGS__>(p);                                                                          \
  }
// Tokens, rows, warpgroups that multiply, strips of the first ones, how many have as many, stages, CTAs of an SM, registers
// of the first ones and of the others; then the numbers.
#define FRAGMENTS_WIDE(STEM, NAME, TOKENS, WEIGHT_ROWS, GROUPS, STRIPS, FULL, STAGES, CTAS, REGISTERS, REST, ...)  \
  extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, CTAS)                                          \
      STEM##_wide_m##TOKENS##_r##WEIGHT_ROWS##_##NAME(                                                            \
          const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::FragmentArguments p) {       \
    using C = stoker::Wide<__VA_ARGS__, TOKENS, GROUPS, STRIPS, FULL, STAGES, REGISTERS, REST>;                   \
    static_assert(C::ROWS == WEIGHT_ROWS, "");                                                                    \
    stoker::fragments_wide<C>(x_map, p);                                                                          \
  }
// Numbers of four bits. As many stages as fit, of 64 tokens and two CTAs an SM with small groups one less (LEAST_STAGES).
#define FRAGMENTS_OF_FOUR_BITS(STEM, NAME, LEAST_STAGES, ...)                          \
  FRAGMENTS_FEW(STEM, NAME, 8, __VA_ARGS__)                                            \
  FRAGMENTS_WIDE(STEM, NAME, 16, 128, 2, 1, 2, 11, 2, 96, 96, __VA_ARGS__)             \
  FRAGMENTS_WIDE(STEM, NAME, 16, 320, 5, 1, 5, 12, 1, 88, 88, __VA_ARGS__)             \
  FRAGMENTS_WIDE(STEM, NAME, 32, 128, 2, 1, 2, 10, 2, 96, 96, __VA_ARGS__)             \
  FRAGMENTS_WIDE(STEM, NAME, 32, 320, 5, 1, 5, 10, 1, 88, 88, __VA_ARGS__)             \
  FRAGMENTS_WIDE(STEM, NAME, 64, 128, 2, 1, 2, LEAST_STAGES, 2, 96, 96, __VA_ARGS__)   \
  FRAGMENTS_WIDE(STEM, NAME, 64, 320, 5, 1, 5, 8, 1, 88, 88, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 128, 128, 2, 1, 2, 8, 1, 224, 224, __VA_ARGS__)           \
  FRAGMENTS_WIDE(STEM, NAME, 128, 256, 2, 2, 2, 7, 1, 224, 224, __VA_ARGS__)           \
  FRAGMENTS_WIDE(STEM, NAME, 128, 320, 2, 3, 1, 6, 1, 256, 208, __VA_ARGS__)           \
  FRAGMENTS_DEQUANTIZE(STEM, NAME, __VA_ARGS__)
// Of eight.
#define FRAGMENTS_OF_EIGHT_BITS(STEM, NAME, ...)                                       \
  FRAGMENTS_FEW(STEM, NAME, 8, __VA_ARGS__)                                            \
  FRAGMENTS_WIDE(STEM, NAME, 16, 128, 2, 1, 2, 8, 2, 96, 96, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 16, 320, 5, 1, 5, 8, 1, 88, 88, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 32, 128, 2, 1, 2, 7, 2, 96, 96, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 32, 320, 5, 1, 5, 7, 1, 88, 88, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 64, 128, 2, 1, 2, 5, 2, 96, 96, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 64, 320, 5, 1, 5, 5, 1, 88, 88, __VA_ARGS__)              \
  FRAGMENTS_WIDE(STEM, NAME, 128, 128, 2, 1, 2, 7, 1, 224, 224, __VA_ARGS__)           \
  FRAGMENTS_WIDE(STEM, NAME, 128, 256, 2, 2, 2, 5, 1, 224, 224, __VA_ARGS__)           \
  FRAGMENTS_WIDE(STEM, NAME, 128, 320, 2, 3, 1, 4, 1, 256, 208, __VA_ARGS__)           \
  FRAGMENTS_DEQUANTIZE(STEM, NAME, __VA_ARGS__)
