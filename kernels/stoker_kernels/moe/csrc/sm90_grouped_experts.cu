// bf16, and e4m3 scaled by rows of x and by rows or blocks of the weight; see sm90_grouped_experts.cuh.
#include "sm90_grouped_experts.cuh"

STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_gate_up_dense, BF16, true)
STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_down_dense, BF16, false)
STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_gate_up_fp8_channel, CHANNEL, true)
STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_down_fp8_channel, CHANNEL, false)
STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_gate_up_fp8_block, BLOCK, true)
STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_down_fp8_block, BLOCK, false)
