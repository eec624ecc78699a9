// Gate-up and down by kind of weight; see sm90_packed_experts.cuh.
#include "sm90_packed_experts.cuh"

STOKER_SM90_PACKED_EXPERTS(sm90_packed_experts_gate_up_mxfp4, MXFP4, true)
STOKER_SM90_PACKED_EXPERTS(sm90_packed_experts_gate_up_nvfp4, NVFP4, true)
STOKER_SM90_PACKED_EXPERTS(sm90_packed_experts_gate_up_int4, INT4, true)
STOKER_SM90_PACKED_EXPERTS(sm90_packed_experts_down_mxfp4, MXFP4, false)
STOKER_SM90_PACKED_EXPERTS(sm90_packed_experts_down_nvfp4, NVFP4, false)
STOKER_SM90_PACKED_EXPERTS(sm90_packed_experts_down_int4, INT4, false)
