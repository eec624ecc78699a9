"""Every setting of `stoker serve` in one table: its names, what it accepts, where it goes, and its help.

Invariants: a flag, its `STOKER_*` variable and its key in a config file are one entry, so they cannot differ; the
names are vLLM's where vLLM has the setting.
Knows nothing of where settings are read from (parse.py) and of how a value is read (values.py).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from stoker_runtime.config import (
    DEVICES,
    DTYPES,
    GENERATION_CONFIGS,
    ISQ_KINDS,
    KV_DTYPES,
    POLICIES,
    QUANTIZATIONS,
    QUANTIZED_EMBEDDINGS,
    QUANTIZED_HEADS,
    RUNNERS,
    EngineConfig,
    ServerConfig,
)
from stoker_runtime.settings.flag import KERNELS, MEMORY, MODEL, NODES, SCHEDULING, SERVER, Flag
from stoker_runtime.settings.node_flags import NODE_FLAGS
from stoker_runtime.settings.server_flags import SERVER_FLAGS
from stoker_runtime.settings.values import choice, integer, kv_events, lora_module, number, pair, runner, switch, text

_ENGINES = "engines side by side, each with the model on GPUs of its own"
_EXPERTS = "share a mixture's experts whole among the GPUs of a stage"
FLAGS: tuple[Flag, ...] = (
    Flag("model", "model", text, MODEL, "ORG/NAME, folder, .gguf file or shape:NAME; usually given bare", "MODEL"),
    Flag("revision", "revision", text, MODEL, "branch, tag or commit of a model of the hub [main]", "REVISION"),
    Flag("tokenizer", "tokenizer", text, MODEL, "tokenizer other than the model's: ORG/NAME, folder or file", "PATH"),
    Flag("dtype", "dtype", choice(DTYPES), MODEL, "type of weights and activations", "|".join(DTYPES)),
    Flag(
        "quantization",
        "quantization",
        choice(QUANTIZATIONS),
        MODEL,
        "weights: fp8, w4 at load; gguf: keep its blocks; or METHOD it has",
        "auto|none|fp8|w4|gguf|METHOD",
        aliases=("q",),
    ),
    Flag(
        "isq",
        "isq",
        choice(ISQ_KINDS),
        MODEL,
        "quantize at load, a few matrices in 16 bits at a time",
        "|".join(ISQ_KINDS),
    ),
    Flag(
        "quantize-head",
        "quantize_head",
        choice(QUANTIZED_HEADS),
        MODEL,
        "output head at load: fp8; a tied embedding keeps its table",
        "|".join(QUANTIZED_HEADS),
    ),
    Flag(
        "quantize-embedding",
        "quantize_embedding",
        choice(QUANTIZED_EMBEDDINGS),
        MODEL,
        "embedding at load: q8_0; a head tied to it becomes the same",
        "|".join(QUANTIZED_EMBEDDINGS),
    ),
    Flag("max-model-len", "max_model_len", integer(0), MODEL, "longest sequence; 0: the model's own", "TOKENS"),
    Flag("language-model-only", "language_model_only", switch, MODEL, "serve a model that sees as one of text"),
    Flag("seed", "seed", integer(0), MODEL, "seed of requests that give none, and of random weights", "N"),
    Flag(
        "generation-config",
        "generation_config",
        choice(GENERATION_CONFIGS),
        MODEL,
        "sampling defaults from the model's generation_config.json, or none",
        "|".join(GENERATION_CONFIGS),
    ),
    Flag(
        "served-model-name",
        "served_model_names",
        text,
        MODEL,
        "names that clients may use; the first answers",
        "NAME",
        many=True,
        words=True,
    ),
    Flag("chat-template", "chat_template", text, MODEL, "Jinja file or source, in place of the model's own", "FILE"),
    Flag(
        "trust-request-chat-template",
        "trust_request_chat_template",
        switch,
        MODEL,
        "take a chat_template from requests, however long it runs",
    ),
    Flag(
        "tool-call-parser",
        "tool_call_parser",
        text,
        MODEL,
        "how tool calls are written, as hermes; auto: by the chat template; none",
        "NAME",
    ),
    Flag(
        "reasoning-parser",
        "reasoning_parser",
        text,
        MODEL,
        "how reasoning is marked, as qwen3; auto: by the chat template; none",
        "NAME",
    ),
    Flag(
        "enable-auto-tool-choice",
        "enable_auto_tool_choice",
        switch,
        MODEL,
        "let the model call tools by itself; default: with a parser",
    ),
    Flag(
        "runner",
        "runner",
        runner,
        MODEL,
        "generate, or pooling: embed and score; auto: by the model's files",
        "|".join(RUNNERS),
        aliases=("task",),
    ),
    Flag(
        "pooler-config",
        "pooler_config",
        text,
        MODEL,
        'how to pool, as {"pooling_type": "MEAN", "normalize": true}',
        "JSON",
        aliases=("override-pooler-config",),
    ),
    Flag("enable-lora", "enable_lora", switch, MODEL, "serve LoRA adapters beside the model"),
    Flag(
        "lora-modules",
        "lora_modules",
        lora_module,
        MODEL,
        "adapters to serve from the start: a name and a PEFT folder, or a JSON object",
        "NAME=PATH",
        many=True,
        words=True,
    ),
    Flag("lora-modules-file", "lora_modules_file", text, MODEL, "adapters to serve, as JSON; followed", "FILE"),
    Flag("max-loras", "max_loras", integer(1), MODEL, "most adapters in one step", "N"),
    Flag("max-lora-rank", "max_lora_rank", integer(1), MODEL, "highest rank of an adapter, up to 256", "RANK"),
    Flag("max-cpu-loras", "max_cpu_loras", integer(0), MODEL, "adapters in host memory; 0: max-loras", "N"),
    Flag(
        "lora-embeddings", "lora_embeddings", switch, MODEL, "make room for adapters of the embedding and output head"
    ),
    Flag(
        "allow-runtime-lora-updating",
        "allow_runtime_lora_updating",
        switch,
        MODEL,
        "let callers load and unload adapters of the server's folders",
    ),
    Flag("device", "device", choice(DEVICES), MEMORY, "where to run", "|".join(DEVICES)),
    Flag(
        "gpu-memory-utilization",
        "gpu_memory_utilization",
        number(0.01, 1.0),
        MEMORY,
        "share of the device's memory to use",
        "FRACTION",
    ),
    Flag("gpu-memory-reserve-gb", "gpu_memory_reserve_gb", number(0.0), MEMORY, "GiB to leave free besides", "GIB"),
    Flag("enable-sleep-mode", "enable_sleep_mode", switch, MEMORY, "let /sleep give the device's memory back"),
    Flag("tune", "tune", switch, MEMORY, "measure products on this GPU first, once, and keep the fastest tiles"),
    Flag(
        "num-gpu-blocks",
        "num_gpu_blocks",
        integer(0),
        MEMORY,
        "KV pages, exactly; 0: what memory allows",
        "PAGES",
        aliases=("num-gpu-blocks-override",),
    ),
    Flag("num-cpu-blocks", "num_cpu_blocks", integer(0), MEMORY, "KV pages in host memory, exactly; 0: none", "PAGES"),
    Flag(
        "swap-space",
        "swap_space",
        number(0.0),
        MEMORY,
        "GiB of host memory for KV of preempted requests and evicted prefixes",
        "GIB",
        aliases=("kv-offloading-size",),
    ),
    Flag(
        "cpu-offload-experts",
        "cpu_offload_experts",
        number(0.0),
        MEMORY,
        "GiB of a mixture's experts to keep in host memory, of the last layers",
        "GIB",
    ),
    Flag("cpu-kv-gb", "cpu_kv_gb", number(0.0), MEMORY, "GiB of KV cache when the device is the CPU", "GIB"),
    Flag("cpu-threads", "cpu_threads", integer(0), MEMORY, "threads that compute on a CPU; 0: by its quota", "N"),
    Flag("block-size", "page_size", integer(0), MEMORY, "tokens of a KV page: 16, 32, 64 or 128; 0: chosen", "TOKENS"),
    Flag(
        "disable-hybrid-kv-cache-manager",
        "disable_hybrid_kv_cache_manager",
        switch,
        MEMORY,
        "let layers with a window keep the KV pages of whole sequences",
    ),
    Flag("kv-cache-dtype", "kv_cache_dtype", choice(KV_DTYPES), MEMORY, "type of the KV cache", "|".join(KV_DTYPES)),
    Flag(
        "tensor-parallel-size",
        "tensor_parallel_size",
        integer(1),
        MEMORY,
        "GPUs, or processes of a CPU, that share each layer",
        "N",
        aliases=("tp",),
    ),
    Flag(
        "pipeline-parallel-size",
        "pipeline_parallel_size",
        integer(1),
        MEMORY,
        "stages that share the layers, each of --tensor-parallel-size GPUs",
        "N",
        aliases=("pp",),
    ),
    Flag("data-parallel-size", "data_parallel_size", integer(1), MEMORY, _ENGINES, "N", aliases=("dp",)),
    Flag(
        "disable-custom-all-reduce",
        "disable_custom_all_reduce",
        switch,
        MEMORY,
        "sum over GPUs by NCCL alone, not by memory that they share",
    ),
    Flag("enable-expert-parallel", "enable_expert_parallel", switch, MEMORY, _EXPERTS, aliases=("ep",)),
    *NODE_FLAGS,
    Flag(
        "max-num-seqs",
        "max_num_seqs",
        integer(0),
        SCHEDULING,
        "most sequences a step; 0: 1024, 256 below 36 GiB or by states, 32 on a CPU",
        "N",
    ),
    Flag(
        "max-num-batched-tokens",
        "max_num_batched_tokens",
        integer(0),
        SCHEDULING,
        "most tokens in a step; 0: 8192, or 2048 below 36 GiB, 512 on a CPU",
        "TOKENS",
    ),
    Flag(
        "num-state-snapshots",
        "num_state_snapshots",
        integer(0),
        SCHEDULING,
        "prefixes whose states are kept, if any are; 0: half of max-num-seqs",
        "N",
    ),
    Flag("max-queued", "max_queued", integer(1), SCHEDULING, "waiting requests beyond which answers are 429", "N"),
    Flag("scheduling-policy", "scheduling_policy", choice(POLICIES), SCHEDULING, "who runs first", "|".join(POLICIES)),
    Flag(
        "enable-prefix-caching", "enable_prefix_caching", switch, SCHEDULING, "share pages of prompts that begin alike"
    ),
    Flag(
        "kv-events-config",
        "kv_events_config",
        kv_events,
        SCHEDULING,
        "publish what the prefix cache gains and loses over ZMQ, for routers",
        "JSON",
    ),
    Flag(
        "speculative-config",
        "speculative_config",
        text,
        SCHEDULING,
        "verify drafts: JSON, its method ngram, suffix, draft_model, eagle3 or mtp",
        "JSON",
        aliases=("sc",),
    ),
    Flag("enforce-eager", "enforce_eager", switch, KERNELS, "run without CUDA graphs"),
    Flag(
        "disable-cascade-attn",
        "disable_cascade_attn",
        switch,
        KERNELS,
        "attend what all rows of a decode step begin with once for each row",
    ),
    Flag(
        "batch-invariant",
        "batch_invariant",
        switch,
        KERNELS,
        "give a request the same logits, bit for bit, whatever runs beside it",
    ),
    Flag("kernel", "kernels", pair, KERNELS, "pin the implementation of an op; repeatable", "OP=IMPL", many=True),
    *SERVER_FLAGS,
)
BY_NAME = {flag.name: flag for flag in FLAGS}
ALIASES = {alias: flag.name for flag in FLAGS for alias in flag.aliases}
OPPOSITES = {opposite: flag.name for flag in FLAGS for opposite in flag.opposites}


DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
    if field.default is not dataclasses.MISSING
}


def spell(value: Any) -> str:
    """A value as a flag spells it; several are separated by commas, a map is JSON."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return ",".join("=".join(each) if isinstance(each, tuple) else str(each) for each in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def help_text() -> str:
    """The text of `stoker serve --help`: flags by group, with their defaults."""
    lines = [
        "usage: stoker serve MODEL [FLAGS]",
        "",
        "Serve MODEL over the OpenAI API: ORG/NAME of the hub (of several GGUF models one by ORG/NAME:Q4_K_M or",
        "ORG/NAME/FILE.gguf), a folder, a .gguf file, or shape:NAME. What lies here wins; the hub is asked for what",
        "does not, with the token of HF_TOKEN.",
        "",
        "Each flag can also be set by an environment variable (--max-model-len is STOKER_MAX_MODEL_LEN) or in a TOML",
        "or YAML file (--config); flags win over variables, variables over files.",
    ]
    for group in (MODEL, MEMORY, NODES, SCHEDULING, KERNELS, SERVER):
        lines += ["", f"{group}:"]
        for flag in (flag for flag in FLAGS if flag.group == group and flag.name != "model"):
            usage = f"--[no-]{flag.name}" if flag.is_switch else f"--{flag.name} {flag.shown}"
            default = DEFAULTS.get(flag.field)
            tail = f" [{spell(default)}]" if default not in (None, "", ()) else ""
            pad = "\n" + " " * 42 if len(usage) > 37 else " " * (40 - len(usage))
            lines.append(f"  {usage}{pad}{flag.help}{tail}")
    return "\n".join(lines) + "\n"
