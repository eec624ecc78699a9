// Rows as they are, and rows with bitmask, bias and penalties; see sm90_sample.cuh.
#include "sm90_sample.cuh"

STOKER_SM90_SAMPLE(sm90_bf16_sample, false)
STOKER_SM90_SAMPLE(sm90_bf16_sample_adjusted, true)
