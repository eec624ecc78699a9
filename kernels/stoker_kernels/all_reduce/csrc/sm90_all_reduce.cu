// One shot, two, and the sum of what was copied, each with what may follow; see sm90_all_reduce.cuh.
#include "sm90_all_reduce.cuh"

STOKER_SM90_ALL_REDUCE(sm90_all_reduce_one, ONE_SHOT, NOTHING)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_one_norm, ONE_SHOT, NORM)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_one_norm_e4m3, ONE_SHOT, NORM_E4M3)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_two, TWO_SHOTS, NOTHING)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_two_norm, TWO_SHOTS, NORM)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_two_norm_e4m3, TWO_SHOTS, NORM_E4M3)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_copied_norm, COPIED, NORM)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_copied_norm_e4m3, COPIED, NORM_E4M3)

extern "C" __global__ void sm90_await_peer(const uint32_t* word, uint32_t value) { stoker::sm90_await_peer(word, value); }
