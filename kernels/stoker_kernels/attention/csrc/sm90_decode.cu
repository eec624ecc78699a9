// bf16 queries over a cache of bf16 or e4m3; see sm90_decode.cuh.
#include "sm90_decode.cuh"

STOKER_SM90_DECODE(sm90_bf16_decode, stoker::bf16_cache)
STOKER_SM90_DECODE(sm90_e4m3_decode, stoker::e4m3_cache)
