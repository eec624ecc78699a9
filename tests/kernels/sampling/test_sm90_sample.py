"""The sampling kernel of csrc/sm90_sample.cuh, run on the CPU by `emulator/`: the reference's tokens, bit for bit."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated

from stoker_kernels.launch import nvcc
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.sampling import SamplingState, SlotSampling, pack_slot_sampling, reference
from stoker_kernels.sampling.sm90_sample import (
    LEAST_CTAS,
    MOST_CTAS,
    STATE_BYTES,
    THREADS,
    SampleArguments,
    cluster_for,
    sample_arguments,
    shared_bytes,
    span_of,
)

CPU = torch.device("cpu")
VOCAB = 4321
HISTORY = {"prompt": [0, 7, 2999, 7], "output": [7, 2999, 2999, 4320, 1501]}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources = tuple(path.name for path in nvcc.headers() if "sampl" in path.stem and path.stem != "sample_ptx")
    library = compile_emulated(sources, "sample.cpp", tmp_path_factory.mktemp("emulator"))
    assert library.arguments_size() == ctypes.sizeof(SampleArguments)
    assert library.state_bytes() == STATE_BYTES
    assert library.threads() == THREADS
    return library


def states(updates: list[SlotSampling], vocab: int) -> tuple[SamplingState, SamplingState]:
    packed = torch.from_numpy(pack_slot_sampling(updates, vocab))
    both = SamplingState.allocate(len(updates), vocab, CPU), SamplingState.allocate(len(updates), vocab, CPU)
    for state in both:
        reference.apply(packed, len(updates), state)
    return both


def check(
    kernels: ctypes.CDLL,
    logits: torch.Tensor,
    updates: list[SlotSampling],
    *,
    adjust: bool = False,
    mask: torch.Tensor | None = None,
    cluster: int = 2,
    steps: int = 1,
) -> list[int]:
    """Rows are the updates' slots; the tokens of the last step. Counts have to agree as well."""
    mine, theirs = states(updates, logits.shape[1])
    slots = torch.tensor([update.slot for update in updates], dtype=torch.int32)
    generator = torch.Generator().manual_seed(steps)
    tokens: list[int] = []
    for step in range(steps):
        positions = torch.randint(1000, slots.shape, generator=generator, dtype=torch.int32)
        expected = reference.sample(logits, theirs, slots, positions, adjust=adjust, bitmask=mask)
        out = torch.full_like(slots, -7)
        arguments = sample_arguments(logits, mine, slots, positions, mask, out, cluster)
        kernels.sample(int(adjust), len(slots), cluster, step, ctypes.byref(arguments))
        assert out.tolist() == expected.tolist()
        tokens = out.tolist()
    assert torch.equal(mine.counts, theirs.counts)
    return tokens


def random_logits(rows: int, vocab: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round(spread * 1000) + vocab)
    return (torch.randn(rows, vocab, generator=generator) * spread).bfloat16()


FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.93},
    {"temperature": 0.9, "top_k": 37},
    {"temperature": 1.1, "top_k": 611, "top_p": 0.55},
    {"temperature": 0.8, "min_p": 0.07},
    {"temperature": 1.7, "top_k": 90, "top_p": 0.97, "min_p": 0.002},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 1e-7},
    {"temperature": 1.0, "top_k": VOCAB - 1},
    {"temperature": 50.0, "top_p": 0.999},
]


@pytest.mark.parametrize("adjust", [False, True])
@pytest.mark.parametrize("spread", [0.004, 1.3, 7.0])
@pytest.mark.parametrize("vocab", [VOCAB, 4328])
def test_every_filter(kernels: ctypes.CDLL, vocab: int, spread: float, adjust: bool) -> None:
    """Values in bins of their own and, at the least spread, in shared ones; rows with and without a last vector."""
    updates = [SlotSampling(i, seed=31 * i - 5, **options) for i, options in enumerate(FILTERS)]
    check(kernels, random_logits(len(updates), vocab, spread), updates, adjust=adjust)


@pytest.mark.parametrize("cluster", [1, 3, MOST_CTAS])
@pytest.mark.parametrize("vocab", [5, 200, 4328])
def test_every_cut_of_a_row(kernels: ctypes.CDLL, vocab: int, cluster: int) -> None:
    """Down to CTAs without an id."""
    updates = [SlotSampling(i, temperature=0.9, top_p=0.8, seed=i) for i in range(3)] + [SlotSampling(3)]
    check(kernels, random_logits(4, vocab, 2.0), updates, cluster=cluster)


def test_penalties_bias_and_suppressed_tokens(kernels: ctypes.CDLL) -> None:
    bias = [(0, 3.5), (2160, -2.0), (2161, 8.0), (4320, 1.25)]
    updates = [
        SlotSampling(0, temperature=0.8, top_k=50, top_p=0.8, seed=1, **PENALTIES, **HISTORY),
        SlotSampling(1, temperature=0.0, **PENALTIES, **HISTORY),
        SlotSampling(2, temperature=1.2, top_p=0.6, seed=4, bias=bias, suppressed=[2161, 2161, 5], suppress_until=400),
        SlotSampling(3, temperature=0.0, bias=bias),
        SlotSampling(4, temperature=1.0, min_p=0.05, seed=8, bias=bias, **PENALTIES, **HISTORY),
    ]
    check(kernels, random_logits(len(updates), VOCAB, 2.5), updates, adjust=True, cluster=3, steps=4)


@pytest.mark.parametrize("share", [0.5, 0.02, 0.0])
def test_a_bitmask(kernels: ctypes.CDLL, share: float) -> None:
    allowed = torch.rand(4, 32 * -(-VOCAB // 32), generator=torch.Generator().manual_seed(2)) < share
    words = (allowed.view(4, -1, 32).long() << torch.arange(32)).sum(dim=2)
    mask = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    updates = [SlotSampling(0), *(SlotSampling(i, temperature=1.0, top_p=0.7, top_k=9 * i, seed=i) for i in (1, 2, 3))]
    tokens = check(kernels, random_logits(4, VOCAB, 1.0), updates, adjust=True, mask=mask)
    assert share == 0.0 or all(allowed[row, token] for row, token in enumerate(tokens))


def test_more_odd_values_than_a_list_holds(kernels: ctypes.CDLL) -> None:
    """All tokens penalized to values of 24 bits: the bound is found by bisection."""
    everything = list(range(VOCAB))
    updates = [
        SlotSampling(0, temperature=1.0, top_k=300, top_p=0.9, seed=3, repetition_penalty=1.7, prompt=everything),
        SlotSampling(1, temperature=1.4, top_p=0.4, seed=6, presence_penalty=0.3, output=everything),
    ]
    check(kernels, random_logits(2, VOCAB, 2.0), updates, adjust=True)


def test_more_values_in_a_group_than_are_searched_at_once(kernels: ctypes.CDLL) -> None:
    """600 odd values between two neighbours of bf16, spread over two lists that hold them."""
    ids = list(range(0, VOCAB, 7))[:600]
    logits = torch.full((1, VOCAB), -6.0).bfloat16()
    logits[0, ids] = 3.0
    values = torch.linspace(0.001, 0.01, len(ids)).tolist()
    update = SlotSampling(0, temperature=1.0, top_k=250, seed=11, bias=list(zip(ids, values, strict=True))[:512])
    check(kernels, logits, [update], adjust=True)


def test_values_beside_the_numbers(kernels: ctypes.CDLL) -> None:
    logits = random_logits(6, 1000, 1.0)
    logits[0, ::3] = math.nan
    logits[1, 5], logits[1, 900] = math.inf, math.inf
    logits[2] = -math.inf
    logits[3, ::2] = 0.0
    logits[3, 1::2] = -0.0
    logits[4] = 1000.0
    logits[4, 17] = 1000.0 + 8.0
    logits[5] = -300.0
    for top_p in (1.0, 0.75):
        check(kernels, logits, [SlotSampling(i, temperature=0.9, top_p=top_p, seed=i) for i in range(6)])


def test_ties_with_the_last_one_kept_are_kept(kernels: ctypes.CDLL) -> None:
    logits = torch.full((12, 640), -4.0).bfloat16()
    logits[:, 100:140] = 1.5
    updates = [SlotSampling(i, temperature=1.0, top_k=3, seed=i) for i in range(12)]
    tokens = check(kernels, logits, updates, steps=2)
    assert len(set(tokens)) > 5
    assert all(100 <= token < 140 for token in tokens)


def test_padding_rows_get_minus_one(kernels: ctypes.CDLL) -> None:
    state, _ = states([SlotSampling(0, temperature=1.0)], 64)
    slots = torch.tensor([-1, 0, -1], dtype=torch.int32)
    out = torch.full_like(slots, -7)
    logits, positions = random_logits(3, 64, 1.0), slots + 5
    arguments = sample_arguments(logits, state, slots, positions, None, out, 2)
    kernels.sample(0, 3, 2, 0, ctypes.byref(arguments))
    assert out[[0, 2]].tolist() == [-1, -1]
    assert 0 <= out[1] < 64


def test_the_largest_published_vocabularies_fit() -> None:
    for rows in (1, 300):
        for adjust in (False, True):
            cluster = cluster_for(rows, 262_208, adjust)
            assert cluster is not None
            assert shared_bytes(262_208, cluster, adjust) <= HOPPER_SHARED
            assert span_of(262_208, cluster) * cluster >= 262_208
    assert cluster_for(300, 151_936, adjust=False) == LEAST_CTAS
    assert cluster_for(300, 10_000_000, adjust=False) is None
