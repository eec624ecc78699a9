// bf16 queries and cache; see sm90_prefill.cuh.
#include "sm90_prefill.cuh"

extern "C" __global__ void __launch_bounds__(stoker::PREFILL_THREADS, 1)
    sm90_bf16_prefill(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                      const __grid_constant__ CUtensorMap v_map, const __grid_constant__ stoker::PrefillArguments g) {
  stoker::sm90_prefill(q_map, k_map, v_map, g);
}
