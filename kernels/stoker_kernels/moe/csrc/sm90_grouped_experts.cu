// bf16, and e4m3 scaled by rows of x and by rows or blocks of the weight; see sm90_grouped_experts.cuh.
#include "sm90_grouped_experts.cuh"

#define ALL(kind, name)                                                             \
  STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_gate_up_##name, kind, true, 1)  \
  STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_gate_up_##name, kind, true, 2)  \
  STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_down_##name, kind, false, 1)    \
  STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_down_##name, kind, false, 2)

ALL(BF16, dense)
ALL(CHANNEL, fp8_channel)
ALL(BLOCK, fp8_block)
