// Products of many tokens with GGUF's planes; see blocks_wide.cuh.
#include "blocks_wide.cuh"

#define WIDE(NAME, TOKENS, WEIGHT_ROWS, GROUPS, STRIPS, END, PAIRS)                                                 \
  extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1)                                               \
      sm90_blocks_wide_##NAME##_m##TOKENS##_r##WEIGHT_ROWS##END(                                                    \
          const __grid_constant__ CUtensorMap x_map, const __grid_constant__ stoker::PlaneMaps maps,                \
          const __grid_constant__ stoker::WideBlockArguments p) {                                                   \
    using C = stoker::WideBlocks<stoker::plane::NAME, TOKENS, GROUPS, STRIPS, PAIRS>;                               \
    static_assert(C::ROWS == WEIGHT_ROWS, "");                                                                      \
    stoker::blocks_wide<C>(x_map, maps, p);                                                                         \
  }
// Tokens and rows of a tile, warpgroups that multiply, strips of each.
#define WIDE_OF(NAME)                  \
  WIDE(NAME, 64, 256, 4, 1, , false)   \
  WIDE(NAME, 128, 192, 3, 1, , false)  \
  WIDE(NAME, 128, 256, 2, 2, , false)  \
  WIDE(NAME, 256, 128, 2, 1, , false)  \
  WIDE(NAME, 256, 128, 2, 1, _pairs, true)

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
