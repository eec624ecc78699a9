"""Sizes by arithmetic: an EngineConfig with "auto" in it becomes one with none, and the KV arena's pages are counted.

Invariants: pure and torch-free; the same inputs give the same sizes on every machine, so a start never probes
the device by running out of memory. Every refusal names the flag to change and the number that would do.
Knows nothing of how memory is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker_runtime.config import CHECKPOINT_METHODS, ISQ_BLOCKS, EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.graphs.spare_graphs import GRAPH_LAYER_BYTES, most_graphs
from stoker_runtime.executor.graphs.step_shape import ShapeTable
from stoker_runtime.executor.states.plan import snapshots_of
from stoker_runtime.executor.windows.layout import kv_layout, pages_in
from stoker_runtime.models.block_parts import scratch_bytes
from stoker_runtime.models.parameter import ITEM_BYTES, Role, stored_kind
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.integer_scheme import IN_SITU, IntegerScheme
from stoker_runtime.models.quantization.quantized_checkpoint import parts_of
from stoker_runtime.models.quantization.schemes import is_packed
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.place import dealt_part

GIB = 1024**3
# What loaded kernels, cuBLAS and small tensors take beside what is counted below: 400 MiB when every kernel has run.
RESERVE_BYTES = 512 * 1024**2
# From here on a GPU has room for wide and long steps: beside 7B they take 3.2 GiB in all, the others 1.7.
LARGE_GPU_BYTES = 36 * GIB
# Most sequences and most tokens of a step, unless they are given.
LARGE_GPU_STEPS, SMALL_GPU_STEPS, CPU_STEPS = (1024, 8192), (256, 2048), (32, 512)
# The part of a GPU's memory that states take at most where nobody says of how many sequences: a fourth.
STATES_PART = 4
# Up to so many tokens no kernel of packed weights dequantizes one into memory; from here on one may.
FUSED_TOKENS = 64
# Prompt tokens whose logits are there at a time when their log-probabilities are wanted; 39 MB at V = 152k.
SCORED_ROWS = 128


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device. `used` is what others and the driver's context hold before Stoker allocates."""

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class Beside:
    """What a second model, which drafts, adds to each token's KV, and what its largest passes take. Bytes.

    `workspace` of passes that are launched kernel by kernel, `graphs` of those within a CUDA graph.
    """

    kv_of_a_token: int = 0
    workspace: int = 0
    graphs: int = 0


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where every byte goes; `pages` of KV are what is left. Bytes unless named otherwise.

    `workspace` is for steps that are launched kernel by kernel, `graphs` for those that are CUDA graphs, which keep
    addresses of their own; `state` rests from step to step.
    """

    weights: int
    workspace: int
    graphs: int
    state: int
    page_bytes: int
    pages: int

    @property
    def overhead(self) -> int:
        """All that is not weights or KV."""
        return self.workspace + self.graphs + self.state

    @property
    def kv_bytes(self) -> int:
        """The KV arena."""
        return self.pages * self.page_bytes


def refuse_beyond(max_model_len: int, max_position: int) -> None:
    """Raises ConfigError for sequences longer than a model has positions for."""
    if max_model_len > max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's positions end at {max_position}; "
            f"set --max-model-len to {max_position} or less.",
            param="max_model_len",
        )


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    device: str,
    gpu_bytes: int = LARGE_GPU_BYTES,
    *,
    cpu_bf16: bool = False, gpu_bf16: bool = True,
) -> EngineConfig:  # fmt: skip
    """Return `config` with every automatic value decided for this model and device ("cuda" or "cpu").

    `gpu_bytes`: all memory of the GPU. `cpu_bf16`: the processor multiplies bf16 in half the time of float32.
    `gpu_bf16`: the GPU multiplies it at all.

    Raises:
        ConfigError: max_model_len beyond what the model was trained for, or a KV type that no kernel reads there.
    """
    dtype = config.dtype
    if dtype == "auto":
        on_cpu = "bfloat16" if cpu_bf16 and spec.dtype == "bfloat16" else "float32"
        dtype = on_cpu if device == "cpu" else _gpu_dtype(spec, gpu_bf16)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if device == "cuda" and kv_dtype not in (dtype, "fp8"):
        raise ConfigError(
            f"kv_cache_dtype is {kv_dtype}, but the model runs in {dtype}, and attention on a GPU reads a cache of the "
            "model's own type or of fp8; leave --kv-cache-dtype out, or give it as fp8.",
            param="kv_cache_dtype",
        )
    refuse_beyond(config.max_model_len, spec.max_position)
    max_len = config.max_model_len or spec.max_position
    most_seqs, most_tokens = CPU_STEPS
    if device == "cuda":
        most_seqs, most_tokens = LARGE_GPU_STEPS if gpu_bytes >= LARGE_GPU_BYTES else SMALL_GPU_STEPS
        if spec.recurrent is not None:
            most_seqs = min(most_seqs, spec.recurrent.sequences(gpu_bytes // STATES_PART, ITEM_BYTES[dtype]))
    max_seqs = config.max_num_seqs or most_seqs
    return replace(
        config,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens or most_tokens, max_seqs),
        num_state_snapshots=snapshots_of(config, spec, max_seqs),
        page_size=config.page_size or (64 if device == "cuda" else 16),
        quantization=resolve_quantization(asked_quantization(config), spec),
    )


def _gpu_dtype(spec: ModelSpec, gpu_bf16: bool) -> str:
    """The checkpoint's dtype; bfloat16 for one in 32 bits, or in four or in integers, whose files say float16 out of
    habit; float16 where the GPU has no bfloat16.
    """
    if not gpu_bf16:
        return "float16"
    habit = any(not isinstance(each, Fp8Checkpoint) for each in parts_of(spec.checkpoint))
    return "bfloat16" if spec.dtype == "float32" or habit else spec.dtype


def refuse_at_load(config: EngineConfig) -> None:
    """Raises ConfigError for what `isq` and `quantize_head` cannot make of weights, and for what contradicts them."""
    if config.quantize_head != "none" and config.quantization == "gguf":
        raise ConfigError(
            f"quantize_head is {config.quantize_head}, but quantization gguf keeps the head in the file's blocks; "
            "leave one of them out.",
            param="quantize_head",
        )
    if config.isq != "none" and config.quantization not in ("auto", config.isq):
        raise ConfigError(
            f"isq is {config.isq}, but quantization is {config.quantization}; give one of them.", param="isq"
        )


def asked_quantization(config: EngineConfig) -> str:
    """What `isq` says, else `quantization`."""
    return config.quantization if config.isq == "none" else config.isq


def resolve_quantization(asked: str, spec: ModelSpec) -> str:
    """ "none", "fp8", "w4", "q8_0" or "q4k" for weights to be quantized at load, "gguf" for those that stay in blocks,
    "fp8" or the method's name for a quantized checkpoint, "mxfp4" for one with experts in it.

    Raises ConfigError where the checkpoint is not what was asked for.
    """
    checkpoint = spec.checkpoint
    if spec.moe is not None and spec.moe.packing:
        return _packed_experts(asked, spec.moe.packing)
    problem = spec.moe.integer_problem(IN_SITU, spec.hidden) if spec.moe is not None and asked == "w4" else None
    if problem is not None:
        raise ConfigError(f"quantization is w4, but of experts {problem}; give it as fp8.", param="quantization")
    if spec.moe is not None and asked in ISQ_BLOCKS:
        raise ConfigError(
            f"isq is {asked}, but experts are not multiplied in blocks; use fp8, or leave --isq out.", param="isq"
        )
    if checkpoint is None or spec.requantized:
        if asked in CHECKPOINT_METHODS:
            raise ConfigError(
                f"quantization is {asked}, but the checkpoint is not quantized; w4 and fp8 quantize it at load.",
                param="quantization",
            )
        if asked in ("auto", "gguf"):
            return "gguf" if spec.blocks.keys() - spec.made else "none"
        return asked
    floats = all(isinstance(each, Fp8Checkpoint) for each in parts_of(checkpoint))
    if asked not in ("auto", checkpoint.method, *(("fp8",) if floats else ())):
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are {checkpoint.described} ({checkpoint.method}); "
            "leave --quantization out.",
            param="quantization",
        )
    return "fp8" if floats else checkpoint.method


def _packed_experts(asked: str, packing: str) -> str:
    """Of a model whose experts are in four bits: its own name, "none" to bring them to 16, "fp8" for what is in 16."""
    if asked not in ("auto", packing, "none", "fp8"):
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's experts are in {packing.upper()}; leave --quantization "
            "out, or give it as fp8 for the other layers, or as none for experts in 16 bits.",
            param="quantization",
        )
    return packing if asked == "auto" else asked


def step_shapes(config: EngineConfig, spec: ModelSpec) -> ShapeTable:
    """The padded shapes of this model's steps; `config` is resolved."""
    return ShapeTable(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        spec.step_parameters,
        padded=config.device == "cuda",
        most_drafts=config.drafting.tokens if config.drafting else 0,
        verify_tokens=verify_tokens(config),
    )


def verify_tokens(config: EngineConfig) -> int:
    """Rows of one token in the widest step that verifies drafts; 0: none does."""
    drafting = config.drafting
    return drafting.verify_tokens(config.max_num_seqs, config.max_num_batched_tokens) if drafting else 0


def sampled_rows(config: EngineConfig) -> int:
    """The most rows that a step samples from."""
    return max(config.max_num_seqs, verify_tokens(config))


def activation_bytes(config: EngineConfig, spec: ModelSpec, tokens: int) -> int:
    """Peak of one step of `tokens`, logits aside: the feed-forward, with gate and up side by side and their product,
    or without a gate what its activation reads and gives.

    Beside them live the residual stream, its norm, what attention gave and what came of it; the holes that queries,
    keys and values left are too small for gate and up.
    """
    kept = 4 * spec.hidden + spec.attended_size
    holes = (4 if spec.attention_gate else 2) * spec.q_size + 2 * spec.kv_size
    if spec.latent is not None:
        holes = spec.latent.working(spec.heads)
    if spec.recurrent is not None:
        holes = max(holes, spec.recurrent.working())
    # The product once more in 8 bits, where the next linear reads that.
    eights = config.quantization == "fp8" or any(each.kind.startswith("fp8") for each in spec.parameters())
    ffn = (3 if spec.gated else 2) * spec.ffn + (spec.ffn // 2 if eights else 0)
    if spec.moe is not None:
        # Each token's experts by themselves: their product of gate and up (in 8 bits, too), then what down gives.
        inner = spec.moe.ffn + (spec.moe.ffn // 2 if eights else 0)
        ffn = max(ffn if spec.has_dense_layer else 0, 3 * spec.moe.shared_ffn)
        ffn += spec.moe.top_k * (inner + spec.hidden) + spec.moe.experts + spec.hidden
    return (tokens * (kept + holes + ffn) + _packed_elements(config, spec, tokens)) * ITEM_BYTES[config.dtype]


def _packed_elements(config: EngineConfig, spec: ModelSpec, tokens: int) -> int:
    """Elements that products with packed weights need besides: the largest weight in 16 bits, x in another order
    or in eight bits.
    """
    kinds = {each.name: stored_kind(each, config.quantization) for each in spec.parameters()}
    # What of experts becomes 16 bits has room of its own (`state_bytes`).
    single = [each for each in spec.parameters() if each.role is not Role.EXPERTS]
    shapes = [each.shape for each in single if is_packed(kinds[each.name])]
    ordered = [each.shape[1] for each in single if isinstance(each.scheme, IntegerScheme) and each.scheme.order]
    wide = max((n * k for n, k in shapes), default=0) if tokens > FUSED_TOKENS else 0
    wide += tokens * max(ordered, default=0)
    rows = [each.shape[1] for each in spec.parameters() if kinds[each.name] == "int8_channel"]
    size = ITEM_BYTES[config.dtype]
    wide = max(wide, scratch_bytes(spec.blocks, {each.name: each.shape for each in single}, size) // size)
    # x once more in eight bits, and its scales.
    return wide + (-(-tokens * (max(rows) + 4) // size) if rows else 0)


def logits_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Logits of the largest step, whose rows are what it samples from."""
    return sampled_rows(config) * spec.vocab * ITEM_BYTES[config.dtype]


def gather_bytes(config: EngineConfig, spec: ModelSpec, rows: int) -> int:
    """What bringing the logits of `rows` together takes beside their place. Gathered: a rank's shard, once more where
    it is narrower than others', and with the rank that gathers all of them. Dealt: a rank's rows, in pieces and whole.
    """
    part = spec.part
    if part is None or part.tensors == 1 or not part.ends:
        return 0
    widest = -(-spec.vocab // part.tensors)
    columns = spec.vocab_rows + widest * ((spec.vocab_rows < widest) + part.tensors * (part.tensor == 0))
    dealt = len(dealt_part(rows, part.tensors, part.tensor))
    return max(rows * columns, 2 * dealt * spec.vocab) * ITEM_BYTES[config.dtype]


def head_bytes(config: EngineConfig, spec: ModelSpec, rows: int) -> int:
    """What a head in 8 bits takes beside the logits of `rows`: the states in 8 bits with their scales, and sums in
    bfloat16 where the model's type is another.
    """
    if not spec.head_kind:
        return 0
    sums = 0 if config.dtype == "bfloat16" else spec.vocab_rows * ITEM_BYTES["bfloat16"]
    return rows * (spec.hidden + ITEM_BYTES["float32"] + sums)


def workspace_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Peak of the largest step without a graph, which may want log-probabilities: of its prompt tokens, a few rows of
    logits at a time, or of what it samples, for which the rows that ask are copied.
    """
    scored = SCORED_ROWS * spec.vocab * (ITEM_BYTES[config.dtype] + ITEM_BYTES["float32"])
    scored += gather_bytes(config, spec, SCORED_ROWS) + head_bytes(config, spec, SCORED_ROWS)
    sampled = max(logits_bytes(config, spec), gather_bytes(config, spec, sampled_rows(config)))
    sampled += head_bytes(config, spec, sampled_rows(config))
    return max(activation_bytes(config, spec, config.max_num_batched_tokens), sampled) + scored


def graph_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Peak of the largest step that is a CUDA graph; graphs never run at the same time, so they share it."""
    if config.device == "cpu" or config.enforce_eager:
        return 0
    gathered = gather_bytes(config, spec, sampled_rows(config)) + head_bytes(config, spec, sampled_rows(config))
    return max(activation_bytes(config, spec, step_shapes(config, spec).most_graphed), gathered)


def budget_bytes(config: EngineConfig, memory: DeviceMemory) -> int:
    """What of a GPU may be in use, by Stoker and all others together."""
    return int(min(memory.total * config.gpu_memory_utilization, memory.total - config.gpu_memory_reserve_gb * GIB))


def page_bytes(config: EngineConfig, spec: ModelSpec, beside: Beside = NOTHING_BESIDE) -> int:
    """Bytes of one KV page of a resolved `config`: of all models that have a part of it."""
    return (kv_layout(config, spec).kv_of_a_token + beside.kv_of_a_token) * config.page_size


def plan_memory(
    config: EngineConfig, spec: ModelSpec, memory: DeviceMemory, weights: int, state: int,
    beside: Beside = NOTHING_BESIDE,
) -> MemoryPlan:  # fmt: skip
    """Count the KV pages that fit beside `weights` and `state` bytes, or take `num_gpu_blocks` and check that they do.

    Both are of all models; what a draft model's pages and passes take is in `beside`.

    Raises ConfigError where not even one sequence of max_model_len fits; the message says what would.
    """
    page = page_bytes(config, spec, beside)
    workspace = max(workspace_bytes(config, spec), beside.workspace)
    plan = MemoryPlan(weights, workspace, max(graph_bytes(config, spec), beside.graphs), state, page, pages=0)
    layout = kv_layout(config, spec)
    pages_for_one = layout.pages(config.max_model_len, config.page_size)
    if config.device == "cpu":
        room = int(config.cpu_kv_gb * GIB)
    else:
        room = budget_bytes(config, memory) - memory.used - weights - plan.overhead
        graphs = 0 if config.enforce_eager else most_graphs(step_shapes(config, spec), adapters=config.enable_lora)
        room -= graphs * spec.num_layers * GRAPH_LAYER_BYTES + RESERVE_BYTES
    taken = (
        f"{weights / GIB:.2f} GiB of weights, {plan.overhead / GIB:.2f} GiB of workspace and "
        f"{memory.used / GIB:.2f} GiB that were in use"
    )
    wanted = config.num_gpu_blocks or pages_in(room, page)
    if wanted * page > room and config.device != "cpu":
        raise ConfigError(
            f"num_gpu_blocks is {wanted} ({wanted * page / GIB:.2f} GiB of KV), but {max(room, 0) / GIB:.2f} GiB "
            f"are left beside {taken}; lower --num-gpu-blocks or raise --gpu-memory-utilization.",
            param="num_gpu_blocks",
        )
    if wanted < 1 and config.device == "cpu":
        raise ConfigError(
            f"cpu_kv_gb is {config.cpu_kv_gb}, but one page of {config.page_size} tokens takes "
            f"{page / GIB:.4f} GiB; raise --cpu-kv-gb.",
            param="cpu_kv_gb",
        )
    if wanted < 1:
        held = spec.recurrent.bytes_of_sequence(ITEM_BYTES[config.dtype]) / 2**20 if spec.recurrent else 0
        lower = f"--max-num-seqs (the states of {config.max_num_seqs} take {held:.1f} MiB each) or " if held else ""
        raise ConfigError(
            f"No memory is left for the KV cache: {taken} in {memory.total / GIB:.2f} GiB at --gpu-memory-utilization "
            f"{config.gpu_memory_utilization}; raise it, lower {lower}--max-num-batched-tokens, "
            f"{'keep experts in host memory (--cpu-offload-experts), ' if spec.moe else ''}or quantize the model.",
            param="gpu_memory_utilization",
        )
    if wanted < pages_for_one and not config.num_gpu_blocks:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs {pages_for_one} KV pages, but {wanted} fit; "
            f"set --max-model-len to {layout.tokens(wanted, config.page_size)} or less.",
            param="max_model_len",
        )
    return replace(plan, pages=wanted)
