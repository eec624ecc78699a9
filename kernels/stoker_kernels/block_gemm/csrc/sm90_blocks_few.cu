// The kernels of GGUF's planes for few tokens; see blocks_few.cuh and blocks_some.cuh.
#include "blocks_few.cuh"
#include "blocks_some.cuh"

#define FEW(FORMAT, N_TILES, TOKENS, NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                           \
      sm90_blocks_few_##NAME##_m##TOKENS(const __grid_constant__ stoker::BlockArguments p) {                     \
    stoker::blocks_few<stoker::FORMAT, N_TILES>(p);                                                              \
  }
#define FEW_OF(FORMAT, NAME)                                                              \
  FEW(FORMAT, 1, 8, NAME)                                                                 \
  FEW(FORMAT, 2, 16, NAME)                                                                \
  extern "C" __global__ void __launch_bounds__(512, 1)                                    \
      sm90_blocks_few_##NAME##_m32(const __grid_constant__ stoker::BlockArguments p) {    \
    stoker::blocks_some<stoker::FORMAT>(p);                                               \
  }

FEW_OF(Q4K, q4_k)
FEW_OF(Q6K, q6_k)
FEW_OF(Q80, q8_0)
FEW_OF(Q40, q4_0)
FEW_OF(Q41, q4_1)
FEW_OF(Q5K, q5_k)
FEW_OF(Q50, q5_0)
FEW_OF(Q51, q5_1)
FEW_OF(IQ4XS, iq4_xs)
FEW_OF(IQ4NL, iq4_nl)
