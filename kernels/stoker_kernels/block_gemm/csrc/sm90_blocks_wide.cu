// Products of many tokens with GGUF's planes; see blocks_wide.cuh.
#include "blocks_wide.cuh"

#define WIDE(NAME, TOKENS, WEIGHT_ROWS)                                                                      \
  extern "C" __global__ void __launch_bounds__(384, 1) sm90_blocks_wide_##NAME##_m##TOKENS##_r##WEIGHT_ROWS( \
      const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::PlaneMaps maps,             \
      const __grid_constant__ stoker::WideBlockArguments p) {                                                \
    stoker::blocks_wide<stoker::WideBlocks<stoker::plane::NAME, TOKENS, WEIGHT_ROWS / 128>>(x_map, maps, p); \
  }
// By tokens and rows of a tile.
#define WIDE_OF(NAME)   \
  WIDE(NAME, 128, 256)  \
  WIDE(NAME, 256, 128)

WIDE_OF(q8_0)
WIDE_OF(q4_0)
WIDE_OF(q4_1)
WIDE_OF(q5_0)
WIDE_OF(q5_1)
WIDE_OF(iq4_nl)
WIDE_OF(iq4_xs)
WIDE_OF(q2_k)
WIDE_OF(q3_k)
WIDE_OF(q4_k)
WIDE_OF(q5_k)
WIDE_OF(q6_k)
