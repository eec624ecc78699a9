"""`stoker tune MODEL`: which tiles multiply this model's weights fastest on this GPU, measured once and kept.

Later starts take what was measured (`executor.kernel_supply`), of any model with weights of the same sizes.
Invariants: nothing of the model is loaded but what describes it; a weight that is known is not measured again unless
asked. Nothing is written on a machine without such a GPU.
Knows nothing of tiles.
"""

from __future__ import annotations

import os
import sys

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, StokerError
from stoker_runtime.fetch.by_name import DESCRIPTIONS, located
from stoker_runtime.settings.parse import parse
from stoker_runtime.terminal.info import tell

AGAIN = "--again"
USAGE = f"""usage: stoker tune MODEL [{AGAIN}] [FLAGS of stoker serve]

Measure the products of MODEL at 1 to 1,024 tokens on this GPU, a few seconds each, and keep the fastest tile of each
for later starts. With --tensor-parallel-size the weights of one rank are measured, on one GPU. What is known already is
left out, unless {AGAIN} asks for it.
"""


def main(argv: list[str]) -> int:
    """Run `stoker tune` and return its exit status: 0, or 2 where nothing can be measured."""
    if not argv or any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(USAGE)
        return 0 if argv else 2
    flags = [argument for argument in argv if argument != AGAIN]
    try:
        config = located(parse(flags, os.environ).engine, only=DESCRIPTIONS, say=tell)
        return measure(config, again=len(flags) < len(argv))
    except StokerError as error:
        sys.stderr.write(f"stoker tune: {error.message}\n")
    except OSError as error:
        sys.stderr.write(f"stoker tune: what was measured cannot be kept: {error}\n")
    return 2


def measure(config: EngineConfig, *, again: bool) -> int:
    """Measure what is not known. Raises StokerError, and OSError where it cannot be written."""
    # Imported once the flags are right: PyTorch takes seconds.
    import torch

    from stoker_kernels.bench.tune import left_to_measure, tune_on_gpu
    from stoker_kernels.launch.dispatch import sm_of
    from stoker_runtime.executor.device import device_memory, multiplies_bf16, open_device
    from stoker_runtime.executor.kernel_supply import TUNED_SM, gemm_weights, supply_cuda
    from stoker_runtime.executor.resolve import asked_quantization, resolve
    from stoker_runtime.models.architectures import build_spec
    from stoker_runtime.models.config_source import read_source
    from stoker_runtime.models.quantized_head import with_head
    from stoker_runtime.parallel.place import places
    from stoker_runtime.parallel.split import split_spec
    from stoker_runtime.weights.block_plan import decoding_reason, plan_blocks

    device = open_device(config.device)
    if device.type != "cuda" or sm_of(device) != TUNED_SM:
        raise ConfigError("tiles are measured on the GPU that they are for, of SM 9.0; there is none here.")
    supply_cuda(device)
    source = read_source(config.model)
    whole = with_head(build_spec(source), config.quantize_head)
    refused = decoding_reason(config, whole, device.type) if config.ranks == 1 else "blocks are not shared among ranks"
    asked, embedding = asked_quantization(config), config.quantize_embedding
    whole = plan_blocks(whole, source, asked, device.type, refused=refused, embedding=embedding).spec
    config = resolve(config, whole, device.type, device_memory(device).total, cpu_bf16=multiplies_bf16())
    tensors, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    ranks = places(tensors, stages, whole_experts=config.enable_expert_parallel)
    found = [
        weight
        for place in ranks
        for weight in gemm_weights(split_spec(whole, place), config.dtype, config.quantization)
    ]
    gpu, weights = torch.cuda.get_device_name(device), list(dict.fromkeys(found))
    left = weights if again else left_to_measure(weights, gpu)
    sys.stdout.write(f"{gpu}: {len(weights)} weights, {len(weights) - len(left)} known\n")
    tune_on_gpu(left, gpu, lambda line: print(line, flush=True))
    return 0
