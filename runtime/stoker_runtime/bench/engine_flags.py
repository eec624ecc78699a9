"""The flags of `stoker bench engine`: what they ask of an engine and of its requests, and what that is called.

Invariants: a flag has the name and the meaning that it has for `stoker serve`. Knows nothing of measuring.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.fetch.by_name import located
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.request import SamplingParams

DESCRIPTION = "The engine's speed by the project's definition, beside vLLM's and the chip's limit."
# Flags of how tokens are chosen, as fields of SamplingParams: their defaults are greedy.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip


def parser(prog: str = "stoker bench engine", description: str = DESCRIPTION) -> argparse.ArgumentParser:
    """The flags of `stoker bench engine`, which other benches of an engine have, too."""
    flags = argparse.ArgumentParser(prog=prog, description=description)
    flags.add_argument("model", nargs="?", default="", help="ORG/NAME of the hub, a folder or .gguf file")
    flags.add_argument("--revision", default="", help="branch, tag or commit of a model of the hub")
    flags.add_argument("--shape", default="", help="random weights: qwen2.5-7b and others, or a folder's config")
    flags.add_argument("--num-hidden-layers", type=int, default=0, help="a shape's first so many, of every kind it has")
    flags.add_argument("--n", default="1,4,16", help="numbers of requests, comma-separated")
    flags.add_argument("--input-len", type=int, default=128)
    flags.add_argument("--output-len", type=int, default=256)
    flags.add_argument(
        "--shared-prefix-len", type=int, default=0, help="more tokens, which all prompts begin with and the cache has"
    )
    flags.add_argument("--uniform", default="", metavar="LEAST-MOST", help="draw input and output lengths uniformly")
    for name, default in SAMPLING_DEFAULTS.items():
        text = "sample all requests so; the tokens that are checked come from a greedy round before"
        flags.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)
    flags.add_argument("--dtype", default="auto")
    flags.add_argument("--quantization", default="auto")
    flags.add_argument("--isq", default="none")
    flags.add_argument("--quantize-head", default="none")
    flags.add_argument("--quantize-embedding", default="none")
    flags.add_argument("--kv-cache-dtype", default="auto")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--max-num-seqs", type=int, default=0)
    flags.add_argument("--max-num-batched-tokens", type=int, default=0)
    flags.add_argument("--max-model-len", type=int, default=0)
    flags.add_argument("--block-size", type=int, default=0)
    flags.add_argument("--gpu-memory-utilization", type=float, default=0.85, help="leave room for the reference")
    flags.add_argument("--cpu-offload-experts", type=float, default=0.0, metavar="GIB", help="experts in host memory")
    flags.add_argument("--kernel", action="append", default=[], metavar="OP=IMPLEMENTATION")
    flags.add_argument("--speculative-config", default="", metavar="JSON", help="verify drafts, as stoker serve does")
    flags.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    flags.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share each layer")
    flags.add_argument("--pipeline-parallel-size", type=int, default=1, help="stages that share the layers")
    flags.add_argument("--enable-expert-parallel", action="store_true", help="whole experts a rank")
    flags.add_argument("--disable-custom-all-reduce", action="store_true", help="all sums over GPUs by NCCL")
    flags.add_argument("--enable-lora", action="store_true", help="with the graphs that adapters run in")
    flags.add_argument("--adapters", type=int, default=0, help="give requests so many random adapters in turn")
    flags.add_argument("--max-lora-rank", type=int, default=16, help="their rank, on every linear")
    flags.add_argument("--disable-cascade-attn", action="store_true", help="attend them once for each row")
    flags.add_argument("--batch-invariant", action="store_true", help="bits of a request do not depend on the batch")
    flags.add_argument(
        "--epsilon", type=float, default=0.0, help="loss of a token, in logits, that is a tie (default: by precision)"
    )
    flags.add_argument("--structured", action="store_true", help="a JSON schema against free text of the same lengths")
    flags.add_argument("--json-schema", type=Path, metavar="FILE", help="the same, with this schema")
    flags.add_argument("--json", type=Path, help="write every row here")
    flags.add_argument("--plot", type=Path, help="draw tok/s over N here (needs matplotlib)")
    return flags


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration the flags ask for, with the model fetched if it is the hub's.

    Raises:
        ConfigError: neither or both of MODEL and --shape, a --kernel that is not OP=IMPLEMENTATION, or layers of which
            a kind is missing.
    """
    if bool(args.model) == bool(args.shape):
        raise ConfigError("Name a model folder or .gguf file, or --shape NAME: exactly one of them.", param="model")
    if args.model and args.num_hidden_layers:
        raise ConfigError("--num-hidden-layers is of a --shape: a checkpoint is run whole.", param="num_hidden_layers")
    if args.shared_prefix_len < 0:
        raise ConfigError("--shared-prefix-len counts tokens: 0 or more.", param="shared_prefix_len")
    pins = []
    for pin in args.kernel:
        op, separator, name = pin.partition("=")
        if not separator:
            raise ConfigError(f"--kernel {pin}: write OP=IMPLEMENTATION.", param="kernel")
        pins.append((op, name))
    config = EngineConfig(
        model=args.model or f"shape:{shape_name(args)}",
        revision=args.revision,
        dtype=args.dtype,
        quantization=args.quantization,
        isq=args.isq,
        quantize_head=args.quantize_head,
        quantize_embedding=args.quantize_embedding,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        page_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        cpu_offload_experts=args.cpu_offload_experts,
        enforce_eager=args.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        disable_custom_all_reduce=args.disable_custom_all_reduce,
        batch_invariant=args.batch_invariant,
        enable_prefix_caching=args.shared_prefix_len > 0,
        disable_cascade_attn=args.disable_cascade_attn,
        speculative_config=args.speculative_config,
        enable_lora=args.enable_lora or args.adapters > 0,
        max_loras=max(1, args.adapters),
        max_lora_rank=args.max_lora_rank,
        max_queued=1 << 20,
        kernels=tuple(pins),
    ).validate()
    return located(config, say=lambda text: print(f"# {text}", flush=True))


def refuse_shared_prefix(args: argparse.Namespace, why: str) -> None:
    """Raises ConfigError for prompts that are to begin alike in a bench of other prompts."""
    if args.shared_prefix_len:
        raise ConfigError(f"--shared-prefix-len does not go with {why}; leave it out.", param="shared_prefix_len")


def shape_name(args: argparse.Namespace) -> str:
    """The shape, cut to its first layers where the flags say so. Raises ConfigError where a kind is missing."""
    count = args.num_hidden_layers
    if not count:
        return str(args.shape)
    whole = build_spec(read_source(f"shape:{args.shape}"))
    firsts = {whole.layer_kind(layer): layer for layer in reversed(range(whole.num_layers))}
    least = max(firsts.values()) + 1
    if not least <= count <= whole.num_layers:
        raise ConfigError(
            f"--num-hidden-layers is {count}; the first {least} to {whole.num_layers} layers of {args.shape} have "
            "every kind that it has.",
            param="num_hidden_layers",
        )
    return f"{args.shape}@{count}"


def peer_key(args: argparse.Namespace, config: EngineConfig) -> str:
    """The group of peers.json that these flags measure: shape/precision/work."""
    work = f"uniform-{args.uniform}" if args.uniform else f"{args.input_len}x{args.output_len}"
    if args.shared_prefix_len:
        work = f"{args.shared_prefix_len}+{work}"  # of which peers.json has no row
    precision = config.dtype if config.quantization == "none" else config.quantization
    if config.quantize_head != "none":
        precision = f"{precision}-head-{config.quantize_head}"
    if config.quantize_embedding != "none":
        precision = f"{precision}-embedding-{config.quantize_embedding}"
    if config.kv_cache_dtype == "fp8":
        precision = f"{precision}-kv-fp8" if config.quantization != "none" else "kv-fp8"
    if args.adapters:
        precision = f"{precision}-lora-{args.adapters}x{args.max_lora_rank}"
    if config.ranks > 1:
        experts = "-ep" if config.enable_expert_parallel else ""
        precision = f"{precision}-tp{config.tensor_parallel_size}-pp{config.pipeline_parallel_size}{experts}"
    if config.batch_invariant:
        precision = f"{precision}-batch-invariant"  # nor of these
    sampled = "/sampled" if args.temperature else ""
    layers = f"@{args.num_hidden_layers}" if args.num_hidden_layers else ""
    return f"{args.shape or args.model}{layers}/{precision}/{work}{sampled}"


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """How the measured rounds choose their tokens.

    Raises:
        ConfigError: a value that no request may have, or a filter of tokens that are not drawn.
    """
    params = SamplingParams(**{name: getattr(args, name) for name in SAMPLING_DEFAULTS})
    if params.temperature == 0.0 and params != SamplingParams(temperature=0.0):
        raise ConfigError("Filters and penalties of sampled tokens need --temperature.", param="temperature")
    if not (0.0 <= params.temperature <= 2.0 and 0.0 < params.top_p <= 1.0 and 0.0 <= params.min_p <= 1.0):
        raise ConfigError("--temperature is 0 to 2, --top-p above 0 and up to 1, --min-p 0 to 1.", param="temperature")
    return params
