"""Attention of images on a CPU, by torch and row by row, against a dense mask."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.image_attention.drawn import FP8, Chunk, Rules, Shape, draw_chunks, make_step

from stoker_kernels.attention import AttentionMeta, attention_workspace, paged_attention, rows_support
from stoker_kernels.image_attention import ImageSpans, image_attention, reference, rows
from stoker_kernels.launch.dispatch import Target, demand_invariance

CPU = torch.device("cpu")
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FULL: 2e-5, HALF: 1e-3, BF16: 8e-3}
NO_ROWS = rows_support(Target("cpu", 0, FULL))


@pytest.mark.parametrize("way", [reference.image_attention, rows.image_attention], ids=["torch", "rows"])
@pytest.mark.parametrize(("cache", "query"), [(FULL, FULL), (HALF, HALF), (BF16, BF16), (FP8, BF16)], ids=str)
def test_drawn_steps_match(way: object, cache: torch.dtype, query: torch.dtype) -> None:
    if way is rows.image_attention and NO_ROWS is not None:
        pytest.skip(NO_ROWS)
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(5):
        shape = Shape(
            pick.choice([4, 16, 64]), pick.randint(1, 3), pick.randint(1, 5), pick.randint(3, 70), cache, query
        )
        rules = Rules(pick.choice([0, 1, pick.randint(2, 40), pick.randint(41, 300)]), pick.choice([0.0, 7.5]))
        chunks = draw_chunks(pick)
        print(shape, rules, chunks)
        make_step(shape, chunks, rules, empty=pick.randint(0, 2), seed=seed).check(way, TOLERANCE[query])


def test_logits_are_held_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(Shape(16, 2, 3, 32), [Chunk(30, 90, ((21, 80),))], Rules(25))
    monkeypatch.setattr(reference, "MAX_LOGITS", 2000)
    step.check(reference.image_attention, TOLERANCE[FULL])


def test_the_last_row_of_an_image_sees_what_causal_attention_shows_it() -> None:
    step = make_step(Shape(16, 2, 3, 32), [Chunk(30, 80, ((21, 80),))], Rules())
    starts, keys = torch.tensor([0, 50], dtype=torch.int32), torch.tensor([80], dtype=torch.int32)
    space = attention_workspace(1, 6, 32, "cpu")
    meta = AttentionMeta(step.page_table, step.spans.slots[:1].clone(), starts, keys, 0, 50, 80, space)
    causal = paged_attention(step.q, step.k, step.v, meta, scale=step.options["scale"])
    both = image_attention(step.q, step.k, step.v, step.page_table, step.spans, out=causal.clone(), **step.options)
    torch.testing.assert_close(both[-1], causal[-1], atol=1e-5, rtol=1e-5)
    assert not torch.isclose(both[:-1], causal[:-1], atol=1e-3).all(dim=-1).any()


@pytest.mark.skipif(NO_ROWS is not None, reason=str(NO_ROWS))
def test_where_invariance_is_demanded_a_rows_bits_do_not_depend_on_the_step() -> None:
    chunks = [Chunk(20, 75, ((24, 61),)), Chunk(130, 210, ((117, 150),)), Chunk(0, 19, ((0, 18),))]
    step = make_step(Shape(16, 2, 3, 40, BF16, BF16), chunks, Rules(21))
    demand_invariance(True)
    try:
        want = step.check(image_attention, TOLERANCE[BF16])
        for index in range(3):
            names = ("slots", "rows", "counts", "begins", "ends")
            spans = replace(step.spans, **{name: getattr(step.spans, name)[index : index + 1] for name in names})
            assert isinstance(spans, ImageSpans)
            got = torch.full_like(step.q, 7.0)
            image_attention(step.q, step.k, step.v, step.page_table, spans, out=got, **step.options)
            part = slice(int(spans.rows), int(spans.rows) + int(spans.counts))
            assert torch.equal(got[part], want[part])
    finally:
        demand_invariance(False)
