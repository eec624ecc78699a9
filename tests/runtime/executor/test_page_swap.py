"""Pages on their way to the host and back: bit by bit, in order, and with the engine above giving the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.runtime.executor.streams import Device, Memory

from stoker_runtime import LLM
from stoker_runtime.bench.engine_mode import default_tolerance
from stoker_runtime.bench.verify import verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.arena import KV_TORCH_DTYPES
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.host_memory import HostPlan
from stoker_runtime.executor.page_swap import PageSwap, by_page, runs
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

PAGES, HOST_PAGES = 24, 16
CPU, GPU = torch.device("cpu"), torch.device("cuda")
Moves = list[tuple[int, int]]


def arena(device: torch.device, dtype: torch.dtype = torch.bfloat16, words: int = 128) -> torch.Tensor:
    """Three layers, two heads, pages of 16 tokens."""
    return torch.zeros((3, 2, PAGES, 2, 16, words), dtype=dtype, device=device)


def swap_of(memory: torch.Tensor, lane_pages: int = 3) -> PageSwap:
    page_bytes = memory.nbytes // PAGES
    return PageSwap(memory, HostPlan(HOST_PAGES, page_bytes, 0.0, lane_pages))


def test_runs_of_consecutive_numbers_are_copied_at_once() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]
    assert list(runs([7])) == [(0, 7, 1)]


@pytest.mark.parametrize("head_dim", [8, 80, 3])
@pytest.mark.parametrize("name", sorted(KV_TORCH_DTYPES))
def test_a_page_comes_back_bit_by_bit(name: str, head_dim: int) -> None:
    memory = arena(CPU, KV_TORCH_DTYPES[name], head_dim)
    generator = torch.Generator().manual_seed(1)
    # Any bits: NaNs of every kind too.
    noise = torch.randint(0, 256, (memory.nbytes,), dtype=torch.uint8, generator=generator)
    memory.view(torch.uint8).view(-1).copy_(noise)
    before = memory.view(torch.uint8).clone()
    swap = swap_of(memory)
    swap.move([(5, 2), (9, 3)], [])
    memory.view(torch.uint8)[:, :, [5, 9]] = 0
    swap.move([], [(2, 20), (3, 5)])
    after = memory.view(torch.uint8)
    assert torch.equal(after[:, :, 20], before[:, :, 5])
    assert torch.equal(after[:, :, 5], before[:, :, 9])
    untouched = [page for page in range(PAGES) if page not in (5, 9, 20)]
    assert torch.equal(after[:, :, untouched], before[:, :, untouched])
    swap.close()
    swap.close()


def random_moves(seed: int, steps: int) -> Iterator[tuple[Moves, Moves]]:
    """What a scheduler may ask of each step: targets of `ins` differ, and so do those of `outs`."""
    rng = random.Random(seed)
    for _ in range(steps):
        outs = list(zip(rng.choices(range(PAGES), k=8), rng.sample(range(HOST_PAGES), 8), strict=True))
        ins = list(zip(rng.choices(range(HOST_PAGES), k=8), rng.sample(range(PAGES), 8), strict=True))
        yield outs[: rng.choice([0, 0, 1, 8])], ins[: rng.choice([0, 0, 1, 8])]


def follow(swap: PageSwap, words: torch.Tensor, step: Callable[[], None], seed: int, steps: int) -> list[int]:
    """Move pages between steps that change every page, so that a copy at the wrong time carries the wrong number.

    Returns the number that each page has to carry in the end; at last the whole host pool comes back.
    """
    device, host = [1000 * page for page in range(1, PAGES + 1)], [0] * HOST_PAGES
    for page, value in enumerate(device):
        words[page] = value
    for outs, ins in random_moves(seed, steps):
        swap.move(outs, ins)
        step()
        for page, kept in outs:
            host[kept] = device[page]
        for kept, page in ins:
            device[page] = host[kept]
        device = [value + 1 for value in device]
    swap.move([], [(page, PAGES - 1 - page) for page in range(HOST_PAGES)])
    for page, value in enumerate(host):
        device[PAGES - 1 - page] = value
    return device


def carried(words: torch.Tensor) -> list[int]:
    """The number that each page carries; -1 for one with several."""
    return [int(page[0, 0]) if bool((page == page[0, 0]).all()) else -1 for page in words.cpu()]


@pytest.mark.parametrize("seed", range(3))
def test_moves_are_in_order_on_the_cpu(seed: int) -> None:
    memory = arena(CPU)
    words = by_page(memory)

    def step() -> None:
        words.add_(1)

    swap = swap_of(memory)
    assert follow(swap, words, step, seed, 300) == carried(words)


def right_order(monkeypatch: pytest.MonkeyPatch, device: Device, seed: int) -> bool:
    """Whether all pages carry the right number on a device that runs streams in any order that events allow."""
    memory = arena(CPU, words=8)
    words = by_page(memory)
    swap = swap_of(memory)
    with monkeypatch.context() as patch:
        device.install(patch)
        swap._pages, swap._host = Memory(device, swap._pages), Memory(device, swap._host)  # type: ignore[assignment]
        swap._on_gpu = True
        swap._open_lanes(3)

        def step() -> None:
            device.launch(lambda: words.add_(1))
            device.run(device.random.choice([0, 0, 3, 30]))

        expected = follow(swap, words, step, seed, 60)
        device.run()
    return expected == carried(words)


def test_no_order_of_streams_that_events_allow_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        assert right_order(monkeypatch, Device(seed), seed), f"order {seed}"


def test_every_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the test above would see it if one were missing."""
    device = Device(0)
    right_order(monkeypatch, device, 0)
    assert len(device.waits) == 5
    for line in device.waits:
        assert not all(right_order(monkeypatch, Device(seed, line), seed) for seed in range(50)), f"line {line}"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_moves_are_in_order_beside_cuda_graphs(seed: int) -> None:
    """Nothing waits on the host: a page is copied out before the graph writes it, and back before the graph reads it.

    Pages of 3 MiB, so that the link takes much longer than a launch, and lanes of three pages, so that a step of eight
    moves needs each of them again.
    """
    memory = arena(GPU, words=8192)
    words = by_page(memory)
    graph = torch.cuda.CUDAGraph()
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        words.add_(0)
    torch.cuda.current_stream().wait_stream(warm)
    with torch.cuda.graph(graph):
        words.add_(1)
    memory.zero_()
    swap = swap_of(memory)
    assert follow(swap, words, graph.replay, seed, 300) == carried(words)
    swap.close()


@pytest.mark.gpu
def test_the_copy_back_runs_beside_the_step_before() -> None:
    """A page is on its way while the step before still runs: it waits for its end to be scattered, not to be sent."""
    memory = arena(GPU, words=8192)
    swap = swap_of(memory, lane_pages=HOST_PAGES)
    swap.move([(page, page) for page in range(HOST_PAGES)], [])
    torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16)
    step_over = torch.cuda.Event()
    for _ in range(200):
        torch.mm(busy, busy)
    step_over.record()
    swap.move([], [(page, page) for page in range(HOST_PAGES)])
    lane = swap._in_lanes._lanes[swap._in_lanes._turn]
    lane.filled.synchronize()
    assert not step_over.query(), "the copy waited for the step that ran"
    torch.cuda.synchronize()
    swap.close()


@pytest.mark.gpu
def test_what_was_pinned_is_let_go() -> None:
    memory = arena(GPU)
    first, second = swap_of(memory), swap_of(memory)
    assert first._host.is_pinned()
    assert first._host.data_ptr() % 4096 == 0
    host = first._host
    for swap in (first, second):
        swap.close()
        swap.close()
    assert not host.is_pinned()


GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def executor(**fields: object) -> Executor:
    tiny: dict[str, object] = {"model": "shape:tiny", "device": "cpu", "max_model_len": 256, "page_size": 16}
    return build_executor(EngineConfig(**(tiny | fields)))  # type: ignore[arg-type]


def requests(total: int, vocab: int, params: SamplingParams, longest: int = 60) -> list[Request]:
    rng = random.Random(4)
    shared = [rng.randrange(vocab) for _ in range(40)]
    prompts = [
        shared[: rng.choice((0, 16, 33, 40))] + [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
        for _ in range(total)
    ]
    return [Request(str(at), tuple(prompt), params, priority=rng.randrange(3)) for at, prompt in enumerate(prompts)]


def run(loop: StepLoop, asked: list[Request]) -> list[Sequence]:
    """Add the requests a few at a time between steps, and run until all ended."""
    rng, queue, sequences = random.Random(9), list(asked), list[Sequence]()
    while queue or loop.has_work:
        for _ in range(min(len(queue), rng.randrange(3))):
            sequences.append(loop.add(queue.pop(0)))
        loop.step()
        loop.scheduler.check()
    return sequences


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_are_the_same_with_and_without_a_host_pool(policy: str, kv_dtype: str, caching: bool) -> None:
    tokens: dict[int, list[list[int]]] = {}
    for blocks in (0, 40):
        built = executor(
            num_gpu_blocks=20, num_cpu_blocks=blocks, max_num_seqs=8, max_num_batched_tokens=24, kv_cache_dtype=kv_dtype
        )
        loop = StepLoop(
            built, EngineConfig(model="shape:tiny", scheduling_policy=policy, enable_prefix_caching=caching)
        )
        sequences = run(loop, requests(24, 256, GREEDY))
        assert all(sequence.finish is FinishReason.LENGTH for sequence in sequences)
        stats = loop.stats()
        assert stats.preemptions > 0
        assert (stats.pages_swapped_in > 0) == (blocks > 0)
        assert (stats.host_pages_total, stats.host_pages_used, stats.swapped) == (blocks, 0, 0)
        tokens[blocks] = [list(each.tokens[each.prompt_length :]) for each in sequences]
        built.close()
    assert tokens[0] == tokens[40]


async def test_the_engine_process_swaps_and_stops_with_sequences_on_the_host() -> None:
    tiny = EngineConfig(model="shape:tiny", device="cpu", max_model_len=256, page_size=16, max_num_seqs=6)
    asked = requests(16, 256, GREEDY)
    with LLM.over(build_executor(tiny), tiny) as llm:
        expected = llm.generate_tokens([each.prompt_token_ids for each in asked], [GREEDY] * len(asked))
    crowded = replace(tiny, num_gpu_blocks=16, num_cpu_blocks=64)
    async with await AsyncEngine.start(crowded, log_level="error") as engine:
        assert engine.ready.description["host_pages"] == "64"
        stream, tokens, left = engine.submit(asked), [list[int]() for _ in asked], len(asked)
        while left:
            for output in await stream.next():
                tokens[int(output.request_id)] += output.tokens
                left -= output.finish is not None
        assert engine.stats().pages_swapped_in > 0
        again = engine.submit([replace(each, id=f"{each.id}b") for each in asked])
        left = len(asked)
        while left and not engine.stats().swapped:
            left -= sum(output.finish is not None for output in await again.next())
        assert left, "nobody was on the host"
    assert tokens == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("caching", [False, True])
def test_the_engine_swaps_on_a_gpu(caching: bool, kv_dtype: str) -> None:
    """Graphs on, many preemptions, and every token checked against the reference."""
    built = executor(
        model="shape:qwen3-0.6b",
        device="cuda",
        page_size=64,
        max_model_len=1024,
        num_gpu_blocks=40,
        num_cpu_blocks=100,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        kv_cache_dtype=kv_dtype,
    )
    # So small a model computes a page about as fast as the link brings it; here pages are to move.
    built.host_page_tokens = 0.0
    loop = StepLoop(built, EngineConfig(model="shape:qwen3-0.6b", enable_prefix_caching=caching))
    sequences = run(loop, requests(32, 150_000, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True), 250))
    stats = loop.stats()
    assert stats.preemptions > 0
    assert stats.pages_swapped_in > 0
    outputs = [(list(each.request.prompt_token_ids), list(each.tokens[each.prompt_length :])) for each in sequences]
    verdict = verify_greedy(built.decoder.spec, built.decoder.weights, outputs, default_tolerance(built.config))
    built.close()
    assert verdict.passed, verdict
