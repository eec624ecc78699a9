// One shot and two, each with what may follow; see sm90_all_reduce.cuh.
#include "sm90_all_reduce.cuh"

STOKER_SM90_ALL_REDUCE(sm90_all_reduce_one, false, NOTHING)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_one_norm, false, NORM)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_one_norm_e4m3, false, NORM_E4M3)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_two, true, NOTHING)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_two_norm, true, NORM)
STOKER_SM90_ALL_REDUCE(sm90_all_reduce_two_norm_e4m3, true, NORM_E4M3)
