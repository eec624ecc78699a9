// bf16, and e4m3 scaled by rows of x and by rows or blocks of the weight; see sm90_grouped_experts.cuh.
#include "sm90_grouped_experts.cuh"

#define BOTH(kind, name, groups, cluster)                                                       \
  STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_gate_up_##name, kind, true, groups, cluster) \
  STOKER_SM90_GROUPED_EXPERTS(sm90_grouped_experts_down_##name, kind, false, groups, cluster)

BOTH(BF16, dense, 2, 1)
BOTH(BF16, dense, 3, 1)
BOTH(BF16, dense, 2, 2)
BOTH(BF16, dense, 3, 2)
BOTH(CHANNEL, fp8_channel, 2, 1)
BOTH(CHANNEL, fp8_channel, 3, 1)
BOTH(CHANNEL, fp8_channel, 2, 2)
BOTH(CHANNEL, fp8_channel, 3, 2)
BOTH(BLOCK, fp8_block, 2, 1)
BOTH(BLOCK, fp8_block, 2, 2)
