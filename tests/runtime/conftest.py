"""Tiny random checkpoints made with transformers, and a way to run a decoder through pages by hand.

Invariants: a checkpoint is made once per session; every parameter is random, biases and norms included, so that
none can be forgotten unseen. `PagedModel` deals pages out of order, so a wrong page shows.
Knows nothing of the engine: it builds `ForwardInputs` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_kernels.attention import AttentionMeta, attention_workspace
from stoker_runtime.executor.arena import kept_by_layer, state_arena
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.quantized_head import with_head
from stoker_runtime.weights.block_plan import plan_blocks
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# Name → configuration class, what differs from BASE, and bytes per file where the checkpoint is sharded.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "llama": ("LlamaConfig", {}, None),
    "llama-eight-heads": ("LlamaConfig", {"num_attention_heads": 8}, None),
    "llama-sharded": ("LlamaConfig", {"num_key_value_heads": 4}, "100KB"),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, None),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, None),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, None),
    "mistral": ("MistralConfig", {"sliding_window": None}, None),
    "mistral-window": ("MistralConfig", {"sliding_window": 8}, None),
    "qwen2": ("Qwen2Config", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}, None),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        None,
    ),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": YARN, "tie_word_embeddings": True}, None),
    "qwen3": ("Qwen3Config", {"head_dim": 32}, None),
    "gemma": ("GemmaConfig", {"head_dim": 20}, None),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.5,
            "final_logit_softcapping": 3.5,
            "tie_word_embeddings": True,
        },
        None,
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        None,
    ),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5},
        None,
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "rope_theta": 2e6, "pad_token_id": None}, None),
}


def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.15 * noise)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the named checkpoint of CHECKPOINTS, fp32 safetensors as transformers saves them."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        # Nothing here may look for a hub.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            import transformers
        if name not in made:
            config_class, changes, shard = CHECKPOINTS[name]
            config = getattr(transformers, config_class)(**{**BASE, **changes})
            model = transformers.AutoModelForCausalLM.from_config(config)
            _randomize(model, seed=len(name))
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name], **({"max_shard_size": shard} if shard else {}))
        return made[name]

    return make


@pytest.fixture(scope="session")
def reference_model(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """The named checkpoint as transformers loads it, eager attention, fp32."""
    import transformers

    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                tiny_checkpoint(name), attn_implementation="eager", dtype=torch.float32
            )
            loaded[name] = model.eval()
        return loaded[name]

    return load


class PagedModel:
    """A decoder with its own pages: `slots` sequences of up to `max_len` tokens on the CPU."""

    def __init__(
        self,
        model: str,
        *,
        quantization: str = "none",
        head: str = "none",
        embedding: str = "none",
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        layers: int | None = None,
        slots: int = 6,
        max_len: int = 256,
        device: torch.device = CPU,
        planes: bool = False,
    ) -> None:
        """`planes`: GGUF's blocks rest as on a GPU."""
        source = read_source(model)
        resting = "cuda" if planes else device.type
        blocks = plan_blocks(with_head(build_spec(source), head), source, quantization, resting, embedding=embedding)
        blocks.announce(str(dtype).removeprefix("torch."))
        self.spec = blocks.spec
        if layers is not None:
            self.spec = self.spec.of_layers([layer % self.spec.num_layers for layer in range(layers)])
        weights = load_weights(source, self.spec, device, dtype, quantization)
        self.decoder = Decoder(self.spec, weights, device, dtype, max_model_len=max_len)
        self._page_size = 16
        pages = slots * max_len // self._page_size
        shape = (self.spec.caches, pages, self.spec.kv_heads, self._page_size, self.spec.head_dim)
        # Poison, so that a key that was never written is noticed.
        self._device = device
        poison = torch.full(shape, torch.nan, device=device).to(kv_dtype or dtype)
        pages_by_layer = torch.stack([poison for _ in self.spec.attending])
        states = state_arena(slots, self.spec, dtype, device)
        for state in states:
            state.fill_(torch.nan)
        self._kv = kept_by_layer(self.spec, pages_by_layer, states)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        self._page_table = order.view(slots, -1)
        self._workspace = attention_workspace(slots, self.spec.heads, self.spec.attended_dim, device)
        self._lengths = [0] * slots

    def step(self, work: Sequence[tuple[int, Sequence[int]]], *, all_logits: bool = False) -> list[torch.Tensor]:
        """Run tokens of several slots in one step; logits of each row's last token `[V]`, or of all its tokens."""
        order = sorted(range(len(work)), key=lambda index: len(work[index][1]) > 1)
        rows = [work[index] for index in order]
        inputs = self._inputs(rows, all_logits)
        for slot, ids in rows:
            self._lengths[slot] += len(ids)
        logits = self.decoder.logits(self.decoder.forward(inputs, self._kv))
        counts = [len(ids) if all_logits else 1 for _, ids in rows]
        pieces = dict(zip(order, logits.split(counts), strict=True))
        return [pieces[index] if all_logits else pieces[index][0] for index in range(len(work))]

    def forget(self) -> None:
        """Start all sequences anew, over what the pages hold."""
        self._lengths = [0] * len(self._lengths)

    def _inputs(self, rows: Sequence[tuple[int, Sequence[int]]], all_logits: bool) -> ForwardInputs:
        counts = [len(ids) for _, ids in rows]
        starts = [sum(counts[:row]) for row in range(len(rows) + 1)]
        positions = [self._lengths[slot] + offset for slot, ids in rows for offset in range(len(ids))]
        slots = [slot for slot, ids in rows for _ in ids]
        size = self._page_size
        mapping = [
            int(self._page_table[slot, position // size]) * size + position % size
            for slot, position in zip(slots, positions, strict=True)
        ]
        lengths = [self._lengths[slot] + len(ids) for slot, ids in rows]
        meta = AttentionMeta(
            page_table=self._page_table.to(self._device),
            seq_slots=self._int32([slot for slot, _ in rows]),
            query_start=self._int32(starts),
            seq_lens=self._int32(lengths),
            num_decodes=sum(count == 1 for count in counts),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            workspace=self._workspace,
        )
        every_row = all_logits or all(count == 1 for count in counts)
        return ForwardInputs(
            ids=self._int32([token for _, ids in rows for token in ids]),
            positions=self._int32(positions),
            slot_mapping=torch.tensor(mapping, dtype=torch.int64, device=self._device),
            attention=meta,
            logits_rows=None if every_row else torch.tensor(starts[1:], device=self._device) - 1,
        )

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """The prompts prefilled in one ragged step, then decoded together."""
        tokens = [[int(row.argmax())] for row in self.step(list(enumerate(prompts)))]
        for _ in range(steps - 1):
            rows = self.step([(slot, output[-1:]) for slot, output in enumerate(tokens)])
            for output, row in zip(tokens, rows, strict=True):
                output.append(int(row.argmax()))
        return tokens


@pytest.fixture(scope="session")
def paged_model() -> type[PagedModel]:
    """The class: call it with a model argument."""
    return PagedModel
