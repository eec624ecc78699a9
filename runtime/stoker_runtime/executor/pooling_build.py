"""From an EngineConfig to a running executor of a model that pools, in the phases of `build.py`.

Invariants: sizes are known before the first large allocation; a kernel that is missing stops the start, by name.
Knows nothing of requests.
"""

from __future__ import annotations

import logging

import torch

from stoker_kernels.launch.dispatch import KernelUnavailable
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, KernelUnavailableError, ModelError
from stoker_runtime.executor.device import device_memory, gpu_bf16, open_rank_device, phase, pin_kernels
from stoker_runtime.executor.kernel_names import refuse_kind
from stoker_runtime.executor.kernel_supply import supply_cuda, supply_triton
from stoker_runtime.executor.pooling import DecoderPooler, EncoderPooler, Pooler, PoolingExecutor
from stoker_runtime.executor.pooling_resolve import plan_pooling, resolve_pooling
from stoker_runtime.executor.resolve import GIB, asked_quantization
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.encoders.encoder import Encoder
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.pooling import PoolingSpec, Task
from stoker_runtime.models.pooling_spec import decoder_spec, pooling_spec
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.weights.block_plan import plan_blocks
from stoker_runtime.weights.encoder import load_encoder
from stoker_runtime.weights.layout import TORCH_DTYPES
from stoker_runtime.weights.load import load_weights
from stoker_runtime.weights.score_head import read_score_row
from stoker_runtime.weights.upload_ahead import UploadAhead

log = logging.getLogger(__name__)


def build_pooling_executor(
    config: EngineConfig,
    source: ModelSource,
    pooling: PoolingSpec,
    seconds: dict[str, float],
    ahead: UploadAhead | None = None,
) -> PoolingExecutor:
    """Load the model and allocate everything. Raises ConfigError, ModelError, KernelUnavailableError."""
    with phase("device", seconds):
        spec = pooling_spec(source)
        device = open_rank_device(config)
        asked = asked_quantization(config)
        config = resolve_pooling(config, spec, pooling, device.type, gpu_bf16=gpu_bf16(device))
        if device.type == "cpu":
            ahead = None
        plan = plan_pooling(config, spec, device_memory(device, ahead.reserved if ahead else 0))
        if isinstance(spec, ModelSpec):
            blocks = plan_blocks(spec, source, asked, device.type, refused="a model that pools keeps no blocks")
            blocks.announce(config.dtype)
    supply_cuda(device)
    pin_kernels(config)
    refuse_kind(config, spec, device)
    with phase("weights", seconds), torch.inference_mode():
        pooler = _load(config, source, spec, pooling, device, ahead)
    executor = PoolingExecutor(config, pooler, pooling, device)
    with phase("kernels", seconds):
        try:
            if device.type == "cuda":
                supply_triton(executor.rehearse)
            executor.load_kernels()
        except KernelUnavailable as error:
            raise KernelUnavailableError(str(error)) from error
    for op, implementation in pooler.kernels().items():
        log.info("kernel: %-22s %s", op, implementation)
    log.info("pooling: %s, %s, %s", pooling.task, pooling.pooling, "normalized" if pooling.normalize else "as it is")
    log.info("memory: weights %.2f GiB, a step at most %.2f GiB", plan.weights / GIB, plan.workspace / GIB)
    executor.start_seconds = seconds
    return executor


def _load(
    config: EngineConfig,
    source: ModelSource,
    spec: EncoderSpec | ModelSpec,
    pooling: PoolingSpec,
    device: torch.device,
    ahead: UploadAhead | None,
) -> Pooler:
    dtype = TORCH_DTYPES[config.dtype]
    if isinstance(spec, EncoderSpec):
        if source.path is None:
            raise ModelError(f"{source.name}: an encoder is a folder of safetensors or a .gguf file.", param="model")
        return EncoderPooler(Encoder(spec, load_encoder(source.path, spec, device, dtype, ahead)), pooling)
    weights = load_weights(source, spec, device, dtype, config.quantization, seed=config.seed, ahead=ahead)
    decoder = Decoder(spec, weights, device, dtype, max_model_len=config.max_model_len)
    score = None
    if pooling.task is Task.SCORE:
        answers = _answer_ids(config, pooling.answers) if pooling.answers else None
        score = read_score_row(source, decoder_spec(source), answers).to(device)
    return DecoderPooler(decoder, pooling, config, device, score)


def _answer_ids(config: EngineConfig, answers: tuple[str, str]) -> tuple[int, int]:
    """The tokens of the answers. Raises ConfigError for one that the vocabulary lacks."""
    tokenizer = Tokenizer.load(config.tokenizer or config.model)
    no, yes = (tokenizer.token_to_id(each) for each in answers)
    if no is None or yes is None:
        lacking = answers[0] if no is None else answers[1]
        raise ConfigError(
            f"pooler_config's classifier_from_token names {lacking!r}, which is no token of {tokenizer.source}.",
            param="pooler_config",
        )
    return no, yes
