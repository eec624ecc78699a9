// bf16 queries over a cache of bf16 or e4m3; see sm90_mixed.cuh.
#include "sm90_mixed.cuh"

STOKER_SM90_MIXED(sm90_bf16_mixed, stoker::bf16_cache)
STOKER_SM90_MIXED(sm90_e4m3_mixed, stoker::e4m3_cache)
