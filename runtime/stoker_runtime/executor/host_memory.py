"""The host pool by arithmetic: how many KV pages and states it holds, whether the machine has the memory, when moving
them pays.

A preempted sequence comes back either by copying its pages from the host or by computing its tokens again. The copy
takes page bytes / link speed; the way out costs nothing, because it runs beside the steps. Computing takes
2 · parameters operations a token. Both by two round figures a device: on the machine of PERF's tables (H200, PCIe 5)
50 GB/s and 400 TFLOP/s, that is 8,000 operations for each byte; older GPUs have slower links and fewer operations, so
the quotient, which alone decides, differs little.

Where layers keep a state, a sequence is of use with its states alone, whatever its length. So states get half of the
memory, or as much as the pages that were asked for take: at most one a page, and one at least.

Invariants: pure but for `free_host_memory`, which reads two files; torch-free.
Knows nothing of how memory is allocated or copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.resolve import GIB, NOTHING_BESIDE, Beside, page_bytes
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec

LINK_BYTES_PER_SECOND = {"cuda": 50e9, "cpu": 5e9}
OPERATIONS_PER_SECOND = {"cuda": 400e12, "cpu": 1e11}
# One of four device buffers through which pages pass, two in each direction: the longer they are, the more pages a
# step can move without waiting for the link.
LANE_BYTES = 64 * 1024**2
LANES = 4
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class HostStatesPlan:
    """The host's copies of states: `count`, each of `layers` layers, of which each takes as many bytes as `parts` say
    of what a sequence keeps there: of its convolution, and its state.

    `tokens`: bringing the states of a sequence back takes as long as computing so many tokens.
    """

    count: int = 0
    layers: int = 0
    parts: tuple[int, ...] = ()
    tokens: float = 0.0

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return self.layers * sum(self.parts)

    @property
    def swaps(self) -> tuple[HostPlan, ...]:
        """How each part moves: a layer of a sequence is what a page is elsewhere."""
        units = self.count * self.layers
        return tuple(HostPlan(units, part, 0.0, max(1, min(units, LANE_BYTES // part))) for part in self.parts if units)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The host pool: `pages` of `page_bytes` each, 0 for none. `lane_pages` pass through one device buffer at a time.

    `page_tokens`: bringing one page back takes as long as computing so many tokens.
    """

    pages: int
    page_bytes: int
    page_tokens: float
    lane_pages: int
    states: HostStatesPlan = HostStatesPlan()

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.pages * self.page_bytes + self.states.count * self.states.state_bytes

    def device_bytes(self, device: str) -> int:
        """Bytes on the device, for the buffers through which pages and states pass; a CPU needs none."""
        if device != "cuda":
            return 0
        own = LANES * self.lane_pages * self.page_bytes
        return own + sum(each.device_bytes(device) for each in self.states.swaps)


NO_HOST_POOL = HostPlan(0, 0, 0.0, 0)


def plan_host(
    config: EngineConfig, spec: ModelSpec, free_memory: Callable[[], int], beside: Beside = NOTHING_BESIDE
) -> HostPlan:
    """The pool that a resolved `config` asks for, in `free_memory()` bytes of the host, which is asked if there is one.

    `beside` is what a draft model's part of a page takes.

    Raises:
        ConfigError: it does not fit, or would not hold a page; names the flag.
    """
    if not (config.num_cpu_blocks or config.swap_space):
        return NO_HOST_POOL
    # A rank of several may have no layer that attends, or none with a state: then these take nothing.
    page = page_bytes(config, spec, beside)
    states = _states(config, spec)
    pages, count = _divide(config, page, states)
    plan = HostPlan(pages, page, 0.0, 1, replace(states, count=count))
    free = free_memory()
    if plan.nbytes > free:
        if config.num_cpu_blocks:
            name, asked = "num_cpu_blocks", f"{pages} pages"
            most = f"{pages * free // plan.nbytes}"
        else:
            name, asked, most = "swap_space", f"{config.swap_space:g} GiB", f"{int(free / GIB * 10) / 10:g}"
        raise ConfigError(
            f"{name} asks for {asked} ({plan.nbytes / GIB:.2f} GiB of host memory), but {free / GIB:.2f} GiB "
            f"are free; lower --{name.replace('_', '-')} to {most} or less.",
            param=name,
        )
    rate = OPERATIONS_PER_SECOND[config.device] / spec.active_bytes("bfloat16") / LINK_BYTES_PER_SECOND[config.device]
    states = replace(plan.states, tokens=states.state_bytes * rate)
    lane = max(1, min(pages, LANE_BYTES // max(page, 1)))
    return replace(plan, page_tokens=page * rate, lane_pages=lane, states=states)


def _states(config: EngineConfig, spec: ModelSpec) -> HostStatesPlan:
    """What the states of a sequence are made of; nothing where no layer keeps one."""
    if spec.recurrent is None:
        return HostStatesPlan()
    window, state = prod(spec.recurrent.window), prod(spec.recurrent.shape)
    return HostStatesPlan(0, spec.recurrent.layers, (window * ITEM_BYTES[config.dtype], state * ITEM_BYTES["float32"]))


def _divide(config: EngineConfig, page: int, states: HostStatesPlan) -> tuple[int, int]:
    """(pages, states) that the memory is for. Raises ConfigError where it has no room for one of each."""
    state, room = states.state_bytes, int(config.swap_space * GIB)
    if config.num_cpu_blocks:
        pages = config.num_cpu_blocks
        return pages, min(pages, max(pages * page // max(state, 1), 1)) if states.parts else 0
    if room < page + state:
        what = "the states of one sequence and a KV page are" if state else "one KV page is"
        raise ConfigError(
            f"swap_space is {config.swap_space:g} GiB, but {what} {(page + state) / GIB:.4f} GiB; "
            "raise --swap-space or leave it out.",
            param="swap_space",
        )
    count = min(max(room // 2 // max(state, 1), 1), (room - page) // max(state, 1)) if states.parts else 0
    pages = (room - count * state) // max(page, 1)
    return pages, min(count, pages)


def free_host_memory() -> int:
    """Bytes that this process can still take: by the machine, and by its control group (v2) where that has a limit."""
    if not MEMINFO.exists():
        # Not Linux, so no control group either.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        counted = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # Clean file pages go first when memory is short, so they count as free: weights just read are such pages.
        used = int((CGROUP / "memory.current").read_text()) - int(counted.get("inactive_file", 0))
        free = min(free, max(0, int(most) - used))
    return free
