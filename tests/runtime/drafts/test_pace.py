"""How many drafts are taken: the best by what they bring and cost, and none where they bring nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stoker_runtime.drafts.pace import Pace, RowPace
from stoker_runtime.drafts.settings import DraftCosts


def live(pace: Pace, rows: int, chances: list[float], costs: dict[int, float], steps: int) -> tuple[float, list[int]]:
    """Tokens a second against plain decoding over `steps` steps, and the k of each step.

    A draft of row r is accepted with `chances[r]`; a step with k drafts takes `costs[k]` plain steps.
    """
    rng = random.Random(rows)
    paces = [pace.new_row() for _ in range(rows)]
    tokens, seconds, taken = 0, 0.0, []
    for step in range(steps):
        k, caps = pace.choose(paces, changed=step == 0)
        taken.append(k)
        tokens += rows
        seconds += costs[k]
        if len(taken) > 1 and taken[-2] == k:
            pace.spent(rows, k, costs[k] * 3e-3)
        if k:
            assert len(caps) == rows
            assert max(caps) <= k
            for row, cap in enumerate(caps):
                if cap:
                    accepted = next((at for at in range(cap) if rng.random() > chances[row]), cap)
                    pace.learn(paces[row], cap, accepted)
                    tokens += accepted
    return tokens / rows / seconds, taken


@pytest.mark.parametrize("rows", [1, 5])
def test_text_that_is_never_foreseen_costs_next_to_nothing(rows: int) -> None:
    pace = Pace(4, 256)
    costs = {k: 1 + 0.35 * k for k in range(5)}
    live(pace, rows, [0.0] * rows, costs, 100)
    speed, taken = live(pace, rows, [0.0] * rows, costs, 2000)
    assert speed > 0.99
    assert any(taken), "it never looks again"


@pytest.mark.parametrize("rows", [1, 6])
def test_a_draft_model_that_is_always_wrong_costs_next_to_nothing(rows: int) -> None:
    """What it would have to compute before it drafts is part of that: long prompts, and each token written since."""
    pace, cost = Pace(4, 256, model=DraftCosts(0.3, 0.004)), 0.0
    paces, lacking = [pace.new_row() for _ in range(rows)], [1000] * rows
    drafted = steps = 0
    for step in range(4000):
        if step % 400 == 399:
            paces[step % rows], lacking[step % rows] = pace.new_row(), 1000
        k, wanted = pace.choose(paces, changed=step % 400 == 399)
        ready = list(wanted)
        for row, cap in enumerate(wanted):
            if cap and lacking[row]:
                joins = pace.catches_up(paces[row], lacking[row], 500, rows)
                cost += lacking[row] * 0.004 * joins
                ready[row] = cap if joins else 0
            lacking[row] = 0 if ready[row] else lacking[row] + 1
        k = k if any(ready) else 0
        pace.spent(rows, k, (1 + 0.5 * k) * 3e-3)
        for row, cap in enumerate(ready):
            if cap:
                pace.learn(paces[row], cap, 0)
        cost, drafted, steps = cost + 0.5 * k, drafted + (k > 0), steps + 1
    assert drafted, "it never looks"
    assert cost / steps < 0.015


def test_text_that_repeats_itself_is_verified_as_far_as_it_pays() -> None:
    cheap = {k: 1 + 0.03 * k for k in range(9)}
    speed, taken = live(Pace(8, 256), 2, [0.97, 0.97], cheap, 800)
    assert speed > 3.5
    assert taken[-1] == 8
    speed, taken = live(Pace(8, 256), 2, [0.55, 0.55], {k: 1 + 0.2 * k for k in range(9)}, 800)
    assert speed > 1.1
    assert 1 <= taken[-1] <= 3, "drafts that are mostly wrong are not worth eight rows"


def test_a_text_that_begins_to_repeat_itself_is_found() -> None:
    pace, costs = Pace(3, 256), {k: 1 + 0.05 * k for k in range(4)}
    row = pace.new_row()
    for _ in range(60):
        k, _ = pace.choose([row], changed=False)
        if k:
            pace.learn(row, k, 0)
    assert pace.choose([row], changed=False)[0] == 0
    found = []
    for _ in range(300):
        k, _ = pace.choose([row], changed=False)
        found.append(k)
        if k:
            pace.learn(row, k, k)
        pace.spent(1, k, costs[k])
    assert found[-1] == 3


def test_who_never_gains_has_no_drafts_beside_one_who_does() -> None:
    pace = Pace(4, 256)
    rows = [RowPace(1.0, 0.95), RowPace(1.0, 0.01), None]
    k, caps = pace.choose(rows, changed=True)
    assert k == 4
    assert caps == (4, 0, 0)


def test_a_wide_batch_has_none() -> None:
    best = [RowPace(1.0, 0.99)] * 65
    assert Pace(3, 256).choose(best[:64], changed=True)[0] == 3
    assert Pace(3, 256).choose(best, changed=True)[0] == 2, "65 rows of four tokens are more than 256"
    assert Pace(3, 256, batch_limit=65).choose(best, changed=True)[0] == 0
    assert Pace(3, 256).choose([RowPace(1.0, 0.99)] * 129, changed=True) == (0, (0,) * 129)


def run(pace: Pace, row: RowPace, steps: int, seconds: Callable[[int], float]) -> list[int]:
    """The k of each of `steps` steps of one sequence whose drafts are all right, which take `seconds(k)`."""
    taken: list[int] = []
    for _ in range(steps):
        k, _ = pace.choose([row], changed=False)
        taken.append(k)
        if k:
            pace.learn(row, k, k)
        if len(taken) > 1 and taken[-2] == k:
            pace.spent(1, k, seconds(k))
    return taken


def test_one_step_that_was_held_up_says_nothing() -> None:
    rng = random.Random(4)

    def seconds(k: int) -> float:
        return (1 + 0.04 * k) * 3e-3 * (9.0 if rng.random() < 0.1 else 1.0)

    for _ in range(20):
        pace = Pace(5, 256)
        for at in range(4):
            pace.spent(1, 0, 3e-3 if at else 3e-2)
        pace.spent(1, 5, 0.1)
        assert run(pace, pace.new_row(), 200, seconds)[-1] >= 3


def test_what_drafts_cost_is_found_out_anew_after_a_while() -> None:
    pace, row = Pace(5, 256), RowPace(1.0, 0.95)
    for _ in range(5):
        pace.spent(1, 0, 3e-3)
        for k in pace.ladder:
            pace.spent(1, k, 1.0)
    assert sum(run(pace, row, 1000, lambda _: 3e-3)) < 20, "what cost so much is looked at now and then alone"
    assert run(pace, row, 5000, lambda _: 3e-3)[-1] == 5


def test_what_drafts_cost_and_bring_is_told() -> None:
    pace = Pace(5, 60)
    costs, gains = pace.figures()
    assert [(size, k) for size, k, _, _ in costs] == [(1, k) for k in (1, 2, 3, 4, 5)], "assumed of one sequence"
    assert all(cost > 1 and not timed for _, _, cost, timed in costs)
    assert [k for k, _ in gains] == [1, 2, 3, 4, 5]
    row = pace.new_row()
    for _ in range(140):
        pace.choose([row] * 11, changed=False)
        pace.learn(row, 2, 1)
        for k, milliseconds in ((0, 4.0), (1, 4.2), (3, 5.0)):
            pace.spent(11, k, milliseconds / 1e3)
    costs, gains = pace.figures()
    told = {(size, k): (cost, timed) for size, k, cost, timed in costs if size != 1}
    # Nine sequences and more are padded to sixteen; the nine have room for 60 tokens, which are six each at most.
    assert told.keys() == {(16, k) for k in (1, 2, 3, 4, 5)}
    assert told[16, 1] == (pytest.approx(1.05), True)
    assert told[16, 3] == (pytest.approx(1.25), True)
    assert told[16, 4] == (pytest.approx(1 + 0.25 * 4 / 3), False), "as its neighbour"
    # One of two is accepted, always: half of those that are tried, and there is always a draft.
    for k, gain in gains:
        assert gain == pytest.approx(sum(0.5**at for at in range(1, k + 1)), rel=0.02)


def test_what_is_told_is_little_behind() -> None:
    pace, row = Pace(2, 256), RowPace(1.0, 0.9)
    before = pace.figures()
    for _ in range(140):
        pace.choose([row], changed=False)
        pace.learn(row, 2, 0)
    assert pace.figures()[1][0][1] < before[1][0][1] / 2


SIXTEEN = {0: 1.0, 1: 1.05, 2: 1.07, 3: 1.08, 4: 1.25, 6: 1.28, 8: 1.51}
"""What a step of 16 sequences of a model of 7B takes on an H200, in plain steps, by its drafts a sequence."""


def write(pace: Pace, paces: list[RowPace], found: float, accepted: float, rng: random.Random) -> float:
    """Tokens a second against plain decoding while each of 16 sequences writes 256 more tokens.

    A sequence has drafts with the chance `found`, each is accepted with the chance `accepted`. A step is chosen before
    the one before it is read.
    """
    tokens, spent, before, unread = 0, 0.0, -1, list[tuple[RowPace, int, int]]()
    while tokens < 256 * len(paces):
        k, caps = pace.choose(paces, changed=tokens == 0)
        for each in unread:
            pace.learn(*each)
        unread = []
        for row, cap in zip(paces, caps, strict=True):
            offered = cap if rng.random() < found else 0
            taken = next((at for at in range(offered) if rng.random() > accepted), offered)
            unread += [(row, offered, taken)] if cap else []
            tokens += 1 + taken
        if k == before:
            pace.spent(len(paces), k, SIXTEEN[k] * 3.8e-3)
        spent, before = spent + SIXTEEN[k], k
    return tokens / len(paces) / spent


@pytest.mark.parametrize(("found", "accepted"), [(0.0, 0.0), (1.0, 0.0), (1.0, 0.03), (1.0, 0.2)])
@pytest.mark.parametrize("seed", range(3))
def test_texts_without_drafts_after_texts_that_had_them(found: float, accepted: float, seed: int) -> None:
    rng, pace = random.Random(seed), Pace(8, 256)
    assert write(pace, [pace.new_row() for _ in range(16)], 1.0, 1.0, rng) > 4
    assert write(pace, [pace.new_row() for _ in range(16)], found, accepted, rng) >= 0.99


@pytest.mark.parametrize("accepted", [0.04, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_get_worse_in_mid_text(accepted: float, seed: int) -> None:
    rng, pace = random.Random(seed), Pace(8, 256)
    paces = [pace.new_row() for _ in range(16)]
    assert write(pace, paces, 1.0, 0.8, rng) > 2.4
    assert write(pace, paces, 1.0, accepted, rng) >= 0.99


@pytest.mark.parametrize(("accepted", "least"), [(0.97, 4.6), (0.9, 3.6), (0.6, 1.75)])
def test_texts_that_repeat_themselves_gain_as_much_as_their_drafts_bring(accepted: float, least: float) -> None:
    rng, pace = random.Random(8), Pace(8, 256)
    for _ in range(3):
        assert write(pace, [pace.new_row() for _ in range(16)], 1.0, accepted, rng) > least
