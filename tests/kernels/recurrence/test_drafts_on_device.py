"""Tokens that may be taken back, in Triton and as defined: what they give, and states once some of them count, are
those of the same tokens one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from stoker_kernels.recurrence import (
    DraftRows,
    RecurrentRows,
    Tried,
    reference,
    reference_drafts,
    triton_settle,
    triton_try,
)

SEED = random.SystemRandom().randrange(1 << 30)
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
TRITON = (triton_try, triton_settle)
DEFINED = (reference_drafts, reference_drafts)
WAYS = pytest.mark.parametrize("ways", [TRITON, DEFINED], ids=["triton", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# The interpreter's numpy says what is meant: exp of what is masked.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Plain = Callable[[Tensor, Tensor, RecurrentRows], Tensor]


@dataclass
class Tries:
    """Rows of up to `steps` tokens, `offered` of each row, of which `taken` count; `slots` there are."""

    rows: DraftRows
    offered: list[int]
    taken: list[int]
    slots: int

    @staticmethod
    def draw(rng: random.Random, device: torch.device) -> Tries:
        count, steps = rng.choice([1, 3, 6]), rng.choice([2, 4, 5])
        slots = rng.sample(range(count + 3), count)
        offered = [rng.randint(1, steps) for _ in slots]
        if count > 1:
            slots[1], offered[1] = -1, 0
        lens = [
            0 if slot < 0 or step >= some else 7 + row + step
            for step in range(steps) for row, (slot, some) in enumerate(zip(slots, offered, strict=True))
        ]  # fmt: skip
        taken = [rng.randint(min(1, some), some) for some in offered]
        rows = DraftRows(_int32(slots, device), _int32(lens, device), steps)
        return Tries(rows, offered, taken, count + 3)

    @property
    def tokens(self) -> int:
        return self.rows.count * self.rows.steps

    def results(self, taken_apart: int, device: torch.device) -> Tensor:
        """How many count, a column of what a step gives."""
        table = torch.full((self.rows.count, taken_apart), 77, dtype=torch.int32, device=device)
        table[:, 0] = _int32(self.taken, device)
        return table[:, 0]

    def one_by_one(self, state: Tensor, x: Tensor, run: Plain, most: list[int]) -> Tensor:
        """What the first `most` tokens of each row give, run as decodes, which move `state` on."""
        found: Tensor | None = None
        for step in range(self.rows.steps):
            for row, slot in enumerate(self.rows.slots.tolist()):
                if slot < 0 or step >= most[row]:
                    continue
                one = RecurrentRows(_int32([slot], x.device), _int32([0, 1], x.device), _int32([9], x.device), 1, 1)
                token = step * self.rows.count + row
                y = run(state, torch.tensor([token], device=x.device), one)
                found = torch.zeros(self.tokens, y.shape[1], dtype=y.dtype, device=x.device) if found is None else found
                found[token] = y[0]
        assert found is not None, "some token runs"
        return found


def _int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def room(layers: int, tokens: int, channels: int, heads: int, dtype: torch.dtype, device: torch.device) -> Tried:
    """For more tokens than there are, with garbage in it."""
    def garbage(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.full((layers, tokens + 3, *shape), 31.0, dtype=kind, device=device)

    return Tried(garbage(channels), garbage(channels), garbage(2, heads, kind=torch.float32))


def of_layer(tried: Tried, layer: int) -> Tried:
    return Tried(tried.inputs[layer], tried.mixed[layer], tried.gates[layer])


def check(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dataclass
class World:
    """The states of two layers: as they were, as they are, and as they should be in the end."""

    tries: Tries
    states: Tensor
    tried: Tried

    def __post_init__(self) -> None:
        self.original, self.expected = self.states.clone(), self.states.clone()

    def layer(self, layer: int, got: Tensor, x: Tensor, plain: Plain, dtype: torch.dtype) -> None:
        """What trying `x` gave in one layer is what `plain` decoding gives."""
        check(got, self.tries.one_by_one(self.original[layer].clone(), x, plain, self.tries.offered), dtype)
        if any(self.tries.taken):
            self.tries.one_by_one(self.expected[layer], x, plain, self.tries.taken)

    def settled(self, settle: Callable[..., None], dtype: torch.dtype) -> None:
        """States stayed until they are settled, and then are those of the tokens that count; all others rest."""
        assert torch.equal(self.states, self.original), "a state moved before it was known how far"
        slots, tries = self.tries.rows.slots, self.tries
        settle(self.states, self.tried, slots, tries.results(2 + tries.rows.steps, slots.device))
        check(self.states, self.expected, dtype)
        moved = [slot for slot, taken in zip(slots.tolist(), tries.taken, strict=True) if taken]
        rest = [slot for slot in range(tries.slots) if slot not in moved]
        assert torch.equal(self.states[:, rest], self.original[:, rest]), "a state of nobody's moved"
        for each in (self.tried.inputs, self.tried.mixed, self.tried.gates):
            assert each[:, tries.tokens :].eq(31).all(), "what lies behind the step was touched"


@pytest.mark.matrix("width", "ways")
@WAYS
@DTYPES
@pytest.mark.parametrize("width", [4, 2, 3])
def test_convolutions(ways: tuple[ModuleType, ...], width: int, dtype: torch.dtype, device: torch.device) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + width)
    torch.manual_seed(rng.randrange(1 << 30))
    tries, channels = Tries.draw(rng, device), rng.choice([37, 140])
    states = torch.randn(2, tries.slots, width - 1, channels, device=device).to(dtype)
    world = World(tries, states, room(2, tries.tokens, channels, 1, dtype, device))
    weight, bias = torch.randn(channels, width, device=device).to(dtype), torch.randn(channels, device=device).to(dtype)
    for layer, shift in enumerate((bias, None)):
        # A part of a wider projection.
        x = torch.randn(tries.tokens, channels + 9, device=device).to(dtype)[:, 5 : 5 + channels]
        got = ways[0].try_conv(x, states[layer], weight, shift, tries.rows, of_layer(world.tried, layer))

        def plain(
            state: Tensor, tokens: Tensor, row: RecurrentRows, x: Tensor = x, shift: Tensor | None = shift
        ) -> Tensor:
            return reference.causal_conv(x[tokens], state, weight, shift, row)

        world.layer(layer, got, x, plain, dtype)
    world.settled(ways[1].settle_conv, dtype)


@WAYS
@DTYPES
def test_state_spaces(ways: tuple[ModuleType, ...], dtype: torch.dtype, device: torch.device) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 1)
    torch.manual_seed(rng.randrange(1 << 30))
    tries = Tries.draw(rng, device)
    groups, head_dim, size = rng.choice([1, 3]), rng.choice([12, 40]), rng.choice([10, 24])
    heads, channels = 2 * groups, 2 * groups * (head_dim + size)
    states = torch.randn(2, tries.slots, heads, head_dim, size, device=device)
    world = World(tries, states, room(2, tries.tokens, channels, heads, dtype, device))
    a_log, d, shift = torch.randn(3, heads, device=device)
    for layer in range(2):
        mixed = world.tried.mixed[layer][: tries.tokens]
        mixed.copy_(torch.randn(mixed.shape, device=device).to(dtype))
        dt = torch.randn(tries.tokens, heads + 2, device=device).to(dtype)[:, 1:-1] * 4
        got = ways[0].try_mamba2(mixed, dt, a_log, d, shift, states[layer], tries.rows, of_layer(world.tried, layer))

        def plain(state: Tensor, tokens: Tensor, row: RecurrentRows, x: Tensor = mixed, dt: Tensor = dt) -> Tensor:
            return reference.mamba2_scan(x[tokens], dt[tokens], a_log, d, shift, state, row)

        world.layer(layer, got, mixed, plain, dtype)
    world.settled(ways[1].settle_mamba2, dtype)


@WAYS
@DTYPES
def test_delta_rules(ways: tuple[ModuleType, ...], dtype: torch.dtype, device: torch.device) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + 2)
    torch.manual_seed(rng.randrange(1 << 30))
    tries = Tries.draw(rng, device)
    key_heads, key, value = rng.choice([1, 2]), rng.choice([9, 20]), rng.choice([12, 40])
    heads = key_heads * rng.choice([1, 2])
    channels = 2 * key_heads * key + heads * value
    states = torch.randn(2, tries.slots, heads, key, value, device=device)
    world = World(tries, states, room(2, tries.tokens, channels, heads, dtype, device))
    a_log, shift = torch.randn(2, heads, device=device)
    for layer in range(2):
        mixed = world.tried.mixed[layer][: tries.tokens]
        mixed.copy_(torch.randn(mixed.shape, device=device).to(dtype))
        a, b = torch.randn(tries.tokens, 2 * heads + 1, device=device).to(dtype)[:, 1:].split(heads, dim=1)
        got = ways[0].try_delta_rule(mixed, b, a, a_log, shift, states[layer], tries.rows, of_layer(world.tried, layer))

        def plain(
            state: Tensor, tokens: Tensor, row: RecurrentRows, x: Tensor = mixed, a: Tensor = a, b: Tensor = b
        ) -> Tensor:
            return reference.gated_delta_rule(x[tokens], b[tokens], a[tokens], a_log, shift, state, row)

        world.layer(layer, got, mixed, plain, dtype)
    world.settled(ways[1].settle_delta_rule, dtype)
