// By kind of weight; see sm90_unpacked_experts.cuh.
#include "sm90_unpacked_experts.cuh"

STOKER_SM90_UNPACKED_EXPERTS(sm90_unpacked_experts_mxfp4, MXFP4)
STOKER_SM90_UNPACKED_EXPERTS(sm90_unpacked_experts_nvfp4, NVFP4)
STOKER_SM90_UNPACKED_EXPERTS(sm90_unpacked_experts_int4, INT4)
