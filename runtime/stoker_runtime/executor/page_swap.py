"""Moves KV pages between the device and host memory, beside the steps that run meanwhile.

On CUDA the host's memory is pinned. A page is scattered over the layers of the arena, and each of its parts is too
small for the link, so pages pass through contiguous device buffers, the lanes:

    out   gather into a lane, on the stream of the steps (µs); lane → host, on a stream of its own
    in    host → lane, on another stream of its own, while the step before still runs; scatter, on the stream of the
          steps

So a step waits for the link only where it moves more pages than two lanes hold, or wants a page back before the copy
is there. On the CPU, where a step has run when it returns, these are plain copies.

Invariants, by events and never by waiting on the host: a page is gathered before anything that comes after may write
it; a lane is filled anew when its last copy is over; a host page is read back after it was written, and scattered
before the step reads it. Everything is allocated once.
Knows nothing of sequences, keys or why a page moves.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from stoker_kernels.pages import copy_pages
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.arena import upload
from stoker_runtime.executor.host_memory import LANES, HostPlan, HostStatesPlan
from stoker_runtime.weights.copy_lanes import locked_pages, unlock_pages

Moves = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Lane:
    """A device buffer `[lane_pages, …]`; `filled` and `empty` are recorded when it was written and read."""

    pages: torch.Tensor
    filled: torch.cuda.Event
    empty: torch.cuda.Event


class PageSwap:
    """The host pool and the way to it."""

    def __init__(self, arena: torch.Tensor, plan: HostPlan) -> None:
        """`arena [layers, caches, pages, Hkv, B, D]`. Raises ConfigError when the host's memory cannot be pinned."""
        self._pages = by_page(arena)
        size, self._on_gpu = plan.pages * plan.page_bytes, arena.device.type == "cuda"
        memory = pinned(size) if self._on_gpu else torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._host = memory.view(self._pages.dtype).view(plan.pages, *self._pages.shape[1:])
        if self._on_gpu:
            self._open_lanes(plan.lane_pages)

    def _open_lanes(self, lane_pages: int) -> None:
        device, shape = self._pages.device, (LANES, lane_pages, *self._pages.shape[1:])
        buffers = torch.zeros(shape, dtype=self._pages.dtype, device=device)
        lanes = [Lane(buffer, torch.cuda.Event(), torch.cuda.Event()) for buffer in buffers]
        self._out_lanes, self._in_lanes = Rotation(lanes[: LANES // 2]), Rotation(lanes[LANES // 2 :])
        self._out_stream, self._in_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._written = torch.cuda.Event()
        """The last copies to the host that were launched are over."""
        # Kernels load at their first launch, which would stall a step: run each once, on pages that are blank still.
        self.move(((0, 0),), ((0, 0),))
        torch.cuda.synchronize(device)

    def move(self, outs: Moves, ins: Moves) -> None:
        """Copy `outs` (device page, host page), then `ins` (host page, device page), before what is launched next."""
        if not self._on_gpu:
            for page, host in outs:
                self._host[host].copy_(self._pages[page])
            for host, page in ins:
                self._pages[page].copy_(self._host[host])
            return
        before = self._written
        if outs:
            self._written = torch.cuda.Event()
            self._move_out(outs)
        if ins:
            just_written = {host for _, host in outs}
            # What the steps before wrote is on the host by now, mostly; this step's own pages would be waited for.
            self._move_in(ins, self._written if any(host in just_written for host, _ in ins) else before)

    def _move_out(self, outs: Moves) -> None:
        steps = torch.cuda.current_stream()
        pairs = upload([(page, at % self._out_lanes.size) for at, (page, _) in enumerate(outs)], self._pages.device)
        for at, lane, part in self._out_lanes.cut(outs):
            steps.wait_event(lane.empty)
            copy_pages(self._pages, lane.pages, pairs[at : at + len(part)])
            lane.filled.record(steps)
            self._out_stream.wait_event(lane.filled)
            with torch.cuda.stream(self._out_stream):
                for first, host, count in runs([host for _, host in part]):
                    self._host[host : host + count].copy_(lane.pages[first : first + count], non_blocking=True)
            lane.empty.record(self._out_stream)
        self._written.record(self._out_stream)

    def _move_in(self, ins: Moves, written: torch.cuda.Event) -> None:
        steps = torch.cuda.current_stream()
        pairs = upload([(at % self._in_lanes.size, page) for at, (_, page) in enumerate(ins)], self._pages.device)
        self._in_stream.wait_event(written)
        for at, lane, part in self._in_lanes.cut(ins):
            self._in_stream.wait_event(lane.empty)
            with torch.cuda.stream(self._in_stream):
                for first, host, count in runs([host for host, _ in part]):
                    lane.pages[first : first + count].copy_(self._host[host : host + count], non_blocking=True)
            lane.filled.record(self._in_stream)
            steps.wait_event(lane.filled)
            copy_pages(lane.pages, self._pages, pairs[at : at + len(part)])
            lane.empty.record(steps)

    def close(self) -> None:
        """Wait for copies and let go of the host's memory. Idempotent."""
        if self._on_gpu:
            torch.cuda.synchronize(self._pages.device)
            unlock_pages(self._host)
            self._on_gpu = False


class Rotation:
    """Lanes that take turns."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.size = len(lanes[0].pages)
        """Pages of a lane."""
        self._lanes = lanes
        self._turn = 0

    def cut(self, moves: Moves) -> Iterator[tuple[int, Lane, Moves]]:
        """Parts of `moves` that fit a lane each: where it starts, the lane whose turn it is, the part."""
        for at in range(0, len(moves), self.size):
            self._turn = (self._turn + 1) % len(self._lanes)
            yield at, self._lanes[self._turn], moves[at : at + self.size]


def by_page(arena: torch.Tensor) -> torch.Tensor:
    """The arena `[layers, caches, pages, Hkv, B, D]` as words, page by page, the same memory:
    `[pages, layers · caches, words]`.

    Words, because not every operation knows every dtype of KV, and a page is moved bit by bit.
    """
    layers, caches, pages = arena.shape[:3]
    words = arena.view(torch.int64 if arena.shape[-1] * arena.itemsize % 8 == 0 else torch.uint8)
    return words.view(layers * caches, pages, math.prod(words.shape[3:])).transpose(0, 1)


def state_swaps(states: Sequence[torch.Tensor], plan: HostStatesPlan) -> list[PageSwap]:
    """Host memory for copies of `states` (`[layers, rows, …]` each). What a page is elsewhere is a layer of a row here:
    number layer · rows + row on the device, row · layers + layer on the host. Errors as `PageSwap`.
    """
    parts = zip(states, plan.swaps, strict=False)
    return [PageSwap(each.flatten(0, 1).flatten(1)[None, None, :, None, None], part) for each, part in parts]


def runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut `numbers` into runs of consecutive ones: index of the first, its number, how many."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield first, numbers[first], at - first
            first = at


def pinned(count: int) -> torch.Tensor:
    """So many bytes, locked for the device's copy engines. Raises ConfigError when the system refuses."""
    try:
        return locked_pages(count)
    except torch.cuda.CudaError as error:
        raise ConfigError(
            f"{count / 1024**3:.2f} GiB of host memory for KV pages cannot be pinned ({error}); lower "
            "--swap-space or --num-cpu-blocks, or raise the limit of locked memory (ulimit -l).",
            param="swap_space",
        ) from error
