"""Runs the texts of a model that pools: one forward pass over whole texts, one vector each.

An encoder sees the texts end to end. A decoder writes the keys and values of each text to pages that the next layer
overwrites: nothing of a text outlives its step.

Invariants: `pool` launches and returns; the values are on the host when `result` returns. Steps run eagerly, never as
CUDA graphs.
Knows nothing of requests, of normalizing, or of why a batch is what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, attention_workspace
from stoker_kernels.launch import dispatch
from stoker_kernels.launch.aot_index import compiled_at_start
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.kernel_names import kernels_in_use
from stoker_runtime.executor.pooling_resolve import pooling_pages
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.encoders.encoder import Encoder, EncoderInputs
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task
from stoker_runtime.step.pool_batch import PoolBatch, PoolRow

WARM_UP_IDS = (0, 1, 2, 3)
# Tokens of texts: kernels are chosen at 128, 256, 2,048 and 4,096 of them.
REHEARSED_LENGTHS = (4, 200, 300, 2500, 5000)


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a step on the device: `ids`, `positions` `[T]` and `starts [S + 1]`, int32."""

    ids: Tensor
    positions: Tensor
    starts: Tensor


class Pooler(Protocol):
    """A model that gives states."""

    architecture: str
    vocab: int
    size: int

    def __call__(self, texts: Texts, rows: tuple[PoolRow, ...]) -> Tensor:
        """What is pooled of each text: `[S, size]`."""
        ...

    def kernels(self) -> dict[str, str]:
        """What runs each op that the model has used so far."""
        ...


class EncoderPooler:
    """An encoder, and which of its states count."""

    def __init__(self, encoder: Encoder, pooling: PoolingSpec) -> None:
        self._encoder = encoder
        self._pooling = pooling
        self.architecture = encoder.spec.architecture
        self.vocab = encoder.spec.vocab
        self.size = 1 if pooling.task is Task.SCORE else encoder.spec.hidden

    def __call__(self, texts: Texts, rows: tuple[PoolRow, ...]) -> Tensor:
        """`Pooler`."""
        spec = self._encoder.spec
        types = np.zeros(len(texts.ids), dtype=np.int32)
        if spec.types > 1:
            at = 0
            for row in rows:
                end = at + len(row.token_ids)
                if row.second_segment:
                    types[at + row.second_segment : end] = 1
                at = end
        inputs = EncoderInputs(texts.ids, texts.positions, to_device(types, texts.ids.device), texts.starts)
        hidden = self._encoder.forward(inputs)
        pooled = pool_states(hidden, texts.starts, self._pooling.pooling)
        return self._encoder.scores(pooled.to(hidden.dtype)) if self._pooling.task is Task.SCORE else pooled

    def kernels(self) -> dict[str, str]:
        """`Pooler`."""
        return dispatch.chosen()


class DecoderPooler:
    """A decoder, the pages that one layer's keys and values take, which of its states count, and, of one that scores,
    what they are multiplied with: `score` fp32 `[hidden]`.
    """

    def __init__(
        self,
        decoder: Decoder,
        pooling: PoolingSpec,
        config: EngineConfig,
        device: torch.device,
        score: Tensor | None = None,
    ) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._pooling = pooling
        self._page_size = config.page_size
        self._score = score
        shape = (spec.caches, pooling_pages(config), spec.kv_heads, config.page_size, spec.head_dim)
        # Zeros, not garbage: masked lanes of attention multiply V's unwritten rows by 0, and 0 x NaN is NaN.
        self._kv = [tuple(torch.zeros(shape, dtype=decoder.dtype, device=device))] * spec.num_layers
        self._workspace = attention_workspace(1, spec.heads, spec.attended_dim, device)
        self.architecture = spec.architecture
        self.vocab = spec.vocab
        self.size = spec.hidden if score is None else 1

    def __call__(self, texts: Texts, rows: tuple[PoolRow, ...]) -> Tensor:
        """`Pooler`."""
        last_only = self._pooling.pooling is Pooling.LAST
        lengths = np.array([len(row.token_ids) for row in rows])
        inputs = ForwardInputs(
            ids=texts.ids,
            positions=texts.positions,
            slot_mapping=to_device(self._slots(lengths), texts.ids.device),
            attention=self._meta(lengths, texts.starts),
            logits_rows=texts.starts[1:].long() - 1 if last_only else None,
        )
        hidden = self._decoder.forward(inputs, self._kv)
        pooled = hidden if last_only else pool_states(hidden, texts.starts, self._pooling.pooling)
        return pooled if self._score is None else (pooled.float() @ self._score)[:, None]

    def kernels(self) -> dict[str, str]:
        """`Pooler`."""
        cache = self._kv[0][0]
        return kernels_in_use(self._decoder.spec, cache.device, cache.dtype)

    def _pages(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(pages of each text, its first page): texts take pages one after the other."""
        counts = -(-lengths // self._page_size)
        return counts, np.cumsum(counts) - counts

    def _slots(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        _, first = self._pages(lengths)
        return np.concatenate([at * self._page_size + np.arange(n) for at, n in zip(first, lengths, strict=True)])

    def _meta(self, lengths: NDArray[np.int64], starts: Tensor) -> AttentionMeta:
        counts, first = self._pages(lengths)
        table = (first[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)).astype(np.int32)
        longest = int(lengths.max())
        return AttentionMeta(
            page_table=to_device(table, starts.device),
            seq_slots=torch.arange(len(lengths), dtype=torch.int32, device=starts.device),
            query_start=starts,
            seq_lens=starts[1:] - starts[:-1],
            num_decodes=0,
            max_query_len=longest,
            max_seq_len=longest,
            workspace=self._workspace,
        )


@dataclass(slots=True)
class Launched:
    """One launched batch: `values` is host memory, complete after `event`."""

    values: Tensor
    event: torch.cuda.Event | None

    def result(self) -> NDArray[np.float32]:
        """Wait for the values."""
        if self.event is not None:
            self.event.synchronize()
        found: NDArray[np.float32] = self.values.numpy()
        return found


class PoolingExecutor:
    """Implements the engine's `PoolingExecutor` protocol for one device. `config` is resolved."""

    num_pages = 0
    page_size = 0
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, config: EngineConfig, pooler: Pooler, pooling: PoolingSpec, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.pooling = pooling
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.vocab_size = pooler.vocab
        self.size = pooler.size
        self.start_seconds: dict[str, float] = {}
        self._pooler = pooler

    @torch.inference_mode()
    def pool(self, batch: PoolBatch) -> Launched:
        """Upload the texts, run the model, start the copy back."""
        values = self._pooler(self._texts(batch.rows), batch.rows).float()
        if self.device.type == "cpu":
            return Launched(values, None)
        host = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Launched(host, event)

    def _texts(self, rows: tuple[PoolRow, ...]) -> Texts:
        lengths = [len(row.token_ids) for row in rows]
        tokens = sum(lengths)
        packed = np.empty(2 * tokens + len(rows) + 1, dtype=np.int32)
        packed[:tokens] = np.concatenate([row.token_ids for row in rows])
        packed[tokens : 2 * tokens] = np.concatenate([np.arange(length) for length in lengths])
        packed[2 * tokens] = 0
        packed[2 * tokens + 1 :] = np.cumsum(lengths)
        ids, positions, starts = to_device(packed, self.device).split((tokens, tokens, len(rows) + 1))
        # Kernels want pointers at multiples of 16 bytes; the packed parts begin anywhere.
        return Texts(ids, positions.clone(), starts.clone())

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run texts of every length that a kernel is chosen by, in a rehearsal (`stoker_kernels.launch.rehearsal`)."""
        most = min(self.max_model_len, self.max_num_batched_tokens)
        for length in sorted({min(length, most) for length in REHEARSED_LENGTHS}):
            rows = (PoolRow((0,) * length),) * max(1, min(2, self.max_num_batched_tokens // length, self.max_num_seqs))
            for batch in (rows, rows[:1]):
                self._pooler(self._texts(batch), batch)

    def load_kernels(self) -> None:
        """Run one short text: kernels load at their first launch, and one that is missing stops the start here."""
        ids = tuple(token for token in WARM_UP_IDS if token < self.vocab_size)[: self.max_model_len]
        self.pool(PoolBatch(0, (PoolRow(ids),))).result()

    def idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    def describe(self) -> dict[str, str]:
        """What the start-up log and `/version` say of this rank."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "model": self.config.model,
            "architecture": self._pooler.architecture,
            "task": self.pooling.task.value,
            "pooling": self.pooling.pooling.value,
            "device": name,
            "dtype": self.config.dtype,
            "quantization": self.config.quantization,
            **{f"kernel.{op}": kernel for op, kernel in self._pooler.kernels().items()},
            **{f"compiled.{kernel}": reason for kernel, reason in compiled_at_start().items()},
            **{f"seconds.{phase}": f"{seconds:.2f}" for phase, seconds in self.start_seconds.items()},
        }

    def close(self) -> None:
        """Nothing outlives a step but the weights, which go with the process."""


def pool_states(hidden: Tensor, starts: Tensor, kind: Pooling) -> Tensor:
    """The vector of each text: `hidden [T, H]`, text i being tokens `[starts[i], starts[i + 1])` → `[S, H]`."""
    if kind is Pooling.CLS:
        return hidden.index_select(0, starts[:-1].long())
    if kind is Pooling.LAST:
        return hidden.index_select(0, starts[1:].long() - 1)
    lengths = (starts[1:] - starts[:-1]).long()
    reduce = "mean" if kind is Pooling.MEAN else "max"
    return torch.segment_reduce(hidden.float(), reduce, lengths=lengths, unsafe=True)


def to_device(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Upload without waiting: through pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
