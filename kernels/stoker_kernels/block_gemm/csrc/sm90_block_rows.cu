// Rows of GGUF's planes in bf16; see block_rows.cuh.
#include "block_rows.cuh"

// Codes of two bits: a lane has eight places, and a CTA more registers.
#define ROWS(NAME, LOW, ...)                                                                                     \
  extern "C" __global__ void __launch_bounds__(stoker::ROWS_THREADS, LOW == 2 ? 2 : 4)                           \
      sm90_block_rows_##NAME(const __grid_constant__ stoker::RowsArguments p) {                                  \
    stoker::block_rows<stoker::RowsFormat<LOW, __VA_ARGS__>>(p);                                                      \
  }

ROWS(q8_0, 4, 4, 32, 128, false)
ROWS(q4_0, 4, 0, 32, 8, false)
ROWS(q4_1, 4, 0, 32, 0, false, true)
ROWS(q5_0, 4, 1, 32, 16, false)
ROWS(q5_1, 4, 1, 32, 0, false, true)
ROWS(iq4_nl, 4, 0, 32, 0, false, false, false, true)
ROWS(iq4_xs, 4, 0, 32, 0, true, false, false, true)
ROWS(q2_k, 2, 0, 16, 0, true, true, true)
ROWS(q3_k, 2, 1, 16, 4, true)
ROWS(q4_k, 4, 0, 32, 0, true, true)
ROWS(q5_k, 4, 1, 32, 0, true, true)
ROWS(q6_k, 4, 2, 16, 32, true)
