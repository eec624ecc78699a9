"""Adapters on one device: a slab with a slot for each adapter that a step may use, and the host's copies.

Invariants: everything on the device is allocated in `__init__`, as `adapter_bytes` counts it. A slot is rewritten on
the stream of the steps, so a step that is under way still reads what it was launched with. A host copy belongs to a
number that is never used again.
Knows nothing of names, and of who may have a slot.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from stoker_kernels.lora import TILE, WORDS, LoraTarget, most_scratch_elements, plan_tiles
from stoker_runtime.adapters.files import HostAdapter, read_adapter
from stoker_runtime.adapters.layout import AdapterLayout, ModelCut
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec

log = logging.getLogger(__name__)


class AdapterMemory:
    """`max_loras` slots of `max_lora_rank` lines each."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        cut: ModelCut | None = None,
    ) -> None:
        """`config` is resolved; `cut` made `spec` of a whole model."""
        self.layout = AdapterLayout.of(spec, embeddings=config.lora_embeddings, cut=cut)
        self.slots = config.max_loras
        self.host_copies = config.host_loras
        self.max_rank = config.max_lora_rank
        self._dtype = dtype
        self._device = device
        self._hosts: dict[int, HostAdapter] = {}
        self._thread: ThreadPoolExecutor | None = None
        line = self.layout.line
        # Zeros, not garbage: what a kernel masks out is never multiplied, but a NaN would show where one is not.
        self.slab = torch.zeros((self.slots, self.max_rank, line), dtype=dtype, device=device)
        self._ranks = torch.zeros((len(self.layout.places), self.slots), dtype=torch.int32, device=device)
        self._words = torch.zeros((len(self.layout.places), WORDS), dtype=torch.int32, device=device)
        self.scratch = torch.empty(scratch_size(config, self.layout), dtype=torch.float32, device=device)
        self.targets = {place.name: self._target(index) for index, place in enumerate(self.layout.places)}

    def _target(self, index: int) -> LoraTarget:
        place = self.layout.places[index]
        pieces = len(place.modules)
        a = self.slab[:, :, place.a : place.a + pieces * place.width]
        return LoraTarget(
            a=a.unflatten(2, (pieces, place.width))[..., : place.columns],
            b=self.slab[:, :, place.b : place.b + sum(place.rows)],
            ranks=self._ranks[index],
            rows=place.rows,
            words=self._words[index],
        )

    def read(self, path: str) -> HostAdapter:
        """Read a PEFT folder; from any thread. Raises ModelError."""
        pinned = self._device.type == "cuda"
        return read_adapter(path, self.layout, max_rank=self.max_rank, dtype=self._dtype, pinned=pinned)

    def begin(self, number: int, path: str) -> Future[HostAdapter]:
        """Have a thread `read` the folder of adapter `number`."""
        del number
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        return self._thread.submit(self.read, path)

    def poll(self) -> None:
        """Called now and then while folders are being read, between steps."""

    def keep(self, number: int, adapter: HostAdapter) -> None:
        """Hold the host's copy of adapter `number`."""
        self._hosts[number] = adapter

    def drop(self, number: int) -> None:
        """Let go of what was read for adapter `number`, whether it was kept or not."""
        self._hosts.pop(number, None)

    def read_again(self) -> None:
        """Read the host's copies from their folders again. One whose folder is gone, or no adapter any more, stays."""
        self._hosts.update((number, fresh) for number, fresh in self._read_anew().items() if number in self._hosts)

    def _read_anew(self) -> dict[int, HostAdapter]:
        """The host's copies once more, of folders that are as they should be."""
        found = {}
        for number, adapter in list(self._hosts.items()):
            try:
                found[number] = self.read(adapter.path)
            except ModelError as error:
                log.warning("an adapter could not be read again and stays as it was: %s", error.message)
        return found

    def load(self, number: int, slot: int) -> None:
        """Copy adapter `number` from the host to `slot`, in the order of the steps, without waiting."""
        adapter = self._hosts[number]
        adapter.copy_to(self.slab[slot, : adapter.rank])
        self._ranks[:, slot].copy_(adapter.ranks, non_blocking=True)


def scratch_size(config: EngineConfig, layout: AdapterLayout) -> int:
    """fp32 elements that any product of any step needs."""
    longest = config.max_num_batched_tokens + config.max_num_seqs
    return max(
        most_scratch_elements(longest, config.max_loras, config.max_lora_rank, pieces, columns)
        for pieces, columns in {(len(place.modules), place.columns) for place in layout.places}
    )


def adapter_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that adapters take on the device: slots, scratch, and the plans of a step; 0 where there are none."""
    if not config.enable_lora:
        return 0
    layout = AdapterLayout.of(spec, embeddings=config.lora_embeddings)
    longest = config.max_num_batched_tokens + config.max_num_seqs
    places = plan_tiles(longest, config.max_loras) * (TILE + 1)
    return (
        slot_bytes(config, spec) * config.max_loras
        + 4 * len(layout.places) * (config.max_loras + WORDS)
        + 4 * scratch_size(config, layout)
        + 4 * (2 * places + 2 * longest + config.max_num_seqs + 1)
    )


def slot_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of one slot, which are those of an adapter of `max_lora_rank` in host memory."""
    line = AdapterLayout.of(spec, embeddings=config.lora_embeddings).line
    return line * config.max_lora_rank * ITEM_BYTES[config.dtype]
