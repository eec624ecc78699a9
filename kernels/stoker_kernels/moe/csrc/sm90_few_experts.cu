// Gate-up and down by kind of weight; see sm90_few_experts.cuh.
#include "sm90_few_experts.cuh"

STOKER_SM90_FEW_EXPERTS(sm90_few_experts_gate_up_dense, BF16, true)
STOKER_SM90_FEW_EXPERTS(sm90_few_experts_gate_up_fp8_channel, CHANNEL, true)
STOKER_SM90_FEW_EXPERTS(sm90_few_experts_gate_up_fp8_block, BLOCK, true)
STOKER_SM90_FEW_EXPERTS(sm90_few_experts_down_dense, BF16, false)
STOKER_SM90_FEW_EXPERTS(sm90_few_experts_down_fp8_channel, CHANNEL, false)
STOKER_SM90_FEW_EXPERTS(sm90_few_experts_down_fp8_block, BLOCK, false)
