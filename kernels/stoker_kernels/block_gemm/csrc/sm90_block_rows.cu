// Rows of GGUF's planes in bf16; see block_rows.cuh.
#include "block_rows.cuh"

// Codes of two bits: a lane has eight places, and a CTA more registers.
#define ROWS(NAME)                                                                                        \
  extern "C" __global__ void __launch_bounds__(stoker::ROWS_THREADS, stoker::plane::NAME::LOW == 2 ? 2 : 4) \
      sm90_block_rows_##NAME(const __grid_constant__ stoker::RowsArguments p) {                           \
    stoker::block_rows<stoker::plane::NAME>(p);                                                           \
  }

ROWS(q8_0)
ROWS(q4_0)
ROWS(q4_1)
ROWS(q5_0)
ROWS(q5_1)
ROWS(iq4_nl)
ROWS(iq4_xs)
ROWS(q2_k)
ROWS(q3_k)
ROWS(q4_k)
ROWS(q5_k)
ROWS(q6_k)
