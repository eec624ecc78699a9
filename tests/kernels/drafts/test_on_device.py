"""Drafts and their acceptance against the reference, which is itself compared with a search by hand."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels import drafts
from stoker_kernels.drafts import Matching, VerifyOutputs, reference

SLOTS, LENGTH, PAGE, PAGES = 23, 2113, 16, 140
OUTPUTS = (torch.int32, torch.int32, torch.int32, torch.int32, torch.int64)


def _by_hand(tokens: list[int], most: int, rules: Matching) -> list[int]:
    """What the definition says, place by place."""
    known = len(tokens)

    def length(end: int) -> int:
        return next((n for n in range(rules.most) if n > end or tokens[end - n] != tokens[known - 1 - n]), rules.most)

    lengths = {end: length(end) for end in range(known - 1)}
    best = max(lengths.values(), default=0)
    if best < rules.least or best == 0:
        return []
    ends = [end for end, n in lengths.items() if n == best]
    if rules.factor:
        most = min(most, int(rules.factor * best))
    found: list[int] = []
    agreeing = ends
    for _ in range(most):
        extended = tokens + found
        token = extended[ends[-1] + 1 + len(found)]
        agreeing = [end for end in agreeing if extended[end + 1 + len(found)] == token]
        if len(agreeing) < rules.share * len(ends):
            break
        found.append(token)
    return found


def _world(seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows (some padding), caps, positions and histories that repeat themselves in many ways."""
    rng = random.Random(seed)
    history = torch.zeros((SLOTS, LENGTH), dtype=torch.int32)
    for slot in range(SLOTS):
        phrase = [rng.randrange(rng.choice([2, 5, 900])) for _ in range(rng.choice([1, 7, 60, LENGTH]))]
        line = [rng.choice(phrase) if rng.random() < 0.05 else phrase[i % len(phrase)] for i in range(LENGTH)]
        history[slot] = torch.tensor(line)
    position = torch.tensor([rng.choice([0, 1, 40, 1024, LENGTH - 1, rng.randrange(LENGTH)]) for _ in range(SLOTS)])
    rows = torch.tensor([*rng.sample(range(SLOTS), 15), -1, -1])
    caps = torch.tensor([rng.randrange(7) for _ in rows])
    return tuple(each.to(torch.int32).to(device) for each in (rows, caps, position, history))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "rules", [Matching(1, 4), Matching(3, 3), Matching(2, 24, 1.5, 0.4), Matching(1, 9, 0.0, 0.75)], ids=str
)
def test_drafts_are_those_of_the_definition(rules: Matching, device: torch.device) -> None:
    rows, caps, position, history = _world(rules.most, device)
    out = torch.full((5, len(rows)), -99, dtype=torch.int32, device=device)
    drafts.match_drafts(rows, caps, position, history, rules, out=out)
    expected = torch.empty((5, len(rows)), dtype=torch.int32)
    reference.match_drafts(rows.cpu(), caps.cpu(), position.cpu(), history.cpu(), rules, out=expected)
    assert torch.equal(out.cpu(), expected)
    for row, (slot, cap) in enumerate(zip(rows.tolist(), caps.tolist(), strict=True)):
        tokens = history[slot, : int(position[slot]) + 1].tolist()
        found = _by_hand(tokens, min(cap, 5), rules) if slot >= 0 else []
        assert expected[:, row].tolist() == found + [-1] * (5 - len(found))
    assert (expected >= 0).any(), "nothing was drafted"


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_passes_of_a_draft_model_are_described(at: int, device: torch.device) -> None:
    rows, caps, position, history = _world(29 + at, device)
    position[rows[0]], caps[0] = 0, 5
    generator = torch.Generator().manual_seed(at)
    table = torch.randint(0, 4000, (SLOTS, PAGES), generator=generator, dtype=torch.int32).to(device)
    guesses = torch.randint(0, 900, (4, len(rows)), generator=generator, dtype=torch.int32).to(device)
    columns = 1 if at else 2
    results = []
    for ops in (drafts, reference):
        where = device if ops is drafts else torch.device("cpu")
        given = [each.to(where) for each in (rows, caps, guesses)]
        state = [each.to(where) for each in (position, history, table)]
        parts = [torch.full((columns * len(rows),), -99, dtype=kind, device=where) for kind in OUTPUTS]
        ops.describe_draft(*given, at, *state, PAGE, out=VerifyOutputs(*parts))
        results.append([each.cpu().tolist() for each in parts])
    assert results[0] == results[1]
    by_hand: list[tuple[int, ...]] = []
    for back in range(columns):
        for row, (slot, cap) in enumerate(zip(rows.tolist(), caps.tolist(), strict=True)):
            place = int(position[slot]) + at - back
            if slot < 0 or cap <= at or not 0 <= place < LENGTH:
                by_hand.append((-1, 0, 0, 0, -1))
                continue
            token = int(guesses[at - 1, row] if at else history[slot, place])
            page = int(table[slot, place // PAGE])
            by_hand.append((slot, token, place, place + 1, page * PAGE + place % PAGE))
    assert list(zip(*results[0], strict=True)) == by_hand
    assert any(line[0] >= 0 for line in by_hand[-len(rows) :]), "every row is padding"


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_verification_is_described_followed_and_accepted(k: int, device: torch.device) -> None:
    rows, _, position, history = _world(k, device)
    generator = torch.Generator().manual_seed(k)
    position = position.clamp_max(LENGTH - k - 2)
    position[rows[0]] = LENGTH - 2
    last = history.gather(1, position[:, None].long())[:, 0].contiguous()
    table = torch.randint(0, 4000, (SLOTS, PAGES), generator=generator, dtype=torch.int32).to(device)
    guesses = torch.randint(0, 3, (k, len(rows)), generator=generator, dtype=torch.int32)
    guesses = torch.where(
        torch.arange(k)[:, None] < torch.randint(0, k + 1, (len(rows),), generator=generator), guesses, -1
    )
    guesses = guesses.to(torch.int32).to(device)
    sampled = torch.randint(0, 3, (k + 1, len(rows)), generator=generator, dtype=torch.int32).to(device)
    sampled[0, 1:5] = guesses[0, 1:5].clamp_min(0)
    results = []
    for ops in (drafts, reference):
        where = device if ops is drafts else torch.device("cpu")
        slots, wide = rows.to(where), (k + 1) * len(rows)
        state = [each.clone().to(where) for each in (last, position, history)]
        parts = [torch.full((wide,), -99, dtype=kind, device=where) for kind in OUTPUTS]
        out = VerifyOutputs(parts[0], parts[1], parts[2], parts[3], parts[4])
        ops.expand_drafts(slots, guesses.to(where), state[0], state[1], table.to(where), PAGE, out=out)
        alive = torch.full_like(slots, -99)
        ops.follow_drafts(slots, sampled[0].to(where), guesses[0].to(where), out=alive)
        taken = torch.full((len(rows), drafts.HEADER + k + 1), -99, dtype=torch.int32, device=where)
        ops.accept_drafts(slots, sampled.to(where), guesses.to(where), state[1], state[0], state[2], out=taken)
        ops.record_tokens(slots, state[1], state[0], state[2])
        described = [getattr(out, name) for name in ("slots", "ids", "positions", "seq_lens", "slot_mapping")]
        results.append([each.cpu() for each in (*described, alive, taken, *state)])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
    _check_by_hand(rows.tolist(), guesses.tolist(), sampled.tolist(), results[0][-4].tolist(), k)
    assert results[0][-2][rows[0]] >= LENGTH - 1, "a sequence reached the end of its history"


def _check_by_hand(
    rows: list[int], guesses: list[list[int]], sampled: list[list[int]], taken: list[list[int]], k: int
) -> None:
    for row, slot in enumerate(rows):
        expected: list[int] = []
        if slot >= 0:
            for column in range(k + 1):
                expected.append(sampled[column][row])
                if column == k or guesses[column][row] != sampled[column][row]:
                    break
        offered = sum(line[row] >= 0 for line in guesses) if slot >= 0 else 0
        assert taken[row] == [len(expected), offered, *expected, *[-1] * (k + 1 - len(expected))]
