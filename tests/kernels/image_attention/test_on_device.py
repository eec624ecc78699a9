"""The kernel of images against a dense mask: drawn shapes, every option, poisoned caches, rows that must stay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.kernels.image_attention.drawn import FP8, Chunk, Rules, Shape, draw_chunks, make_step

from stoker_kernels.image_attention import image_attention
from stoker_kernels.launch.pdl import enable_pdl

# Triton's interpreter turns loop bounds that it loaded, arrays of one element, into integers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FULL: 2e-5, HALF: 2e-3, BF16: 1.2e-2}
# The interpreter's product of bf16 matrices is garbage.
TYPES = [(FULL, FULL), (HALF, HALF), (FP8, HALF), *(pytest.param(c, BF16, marks=pytest.mark.gpu) for c in (BF16, FP8))]
# A whole image, two of one sequence, one begun before, a text without any, one at the very beginning.
CHUNKS = [
    Chunk(20, 75, ((24, 61),)),
    Chunk(80, 145, ((67, 96), (103, 141))),
    Chunk(8, 30, ()),
    Chunk(0, 19, ((0, 18),)),
]
FIELDS = ("slots", "rows", "counts", "begins", "ends")


def drawn(seed: int) -> random.Random:
    print(f"seed {seed}")  # what a failure is repeated by
    return random.Random(seed)


@pytest.mark.parametrize(("cache", "query"), TYPES, ids=str)
def test_drawn_shapes_match(cache: torch.dtype, query: torch.dtype, device: torch.device) -> None:
    pick = drawn(random.SystemRandom().randrange(1 << 30))
    for _ in range(2):
        page, heads, group = pick.choice([16, 32, 64, 128]), pick.randint(1, 3), pick.randint(1, 9)
        shape = Shape(page, heads, group, 2 * pick.randint(4, 70), cache, query)
        rules = Rules(pick.choice([0, 1, pick.randint(2, 40), pick.randint(41, 300)]), pick.choice([0.0, 0.0, 7.5]))
        chunks = draw_chunks(pick)
        print(shape, rules, chunks)
        step = make_step(shape, chunks, rules, empty=pick.randint(0, 2), seed=pick.randint(0, 99), device=device)
        step.check(image_attention, TOLERANCE[query])


@pytest.mark.matrix(take=9)
@pytest.mark.parametrize("window", [0, 9, 48, 100])
@pytest.mark.parametrize(("cache", "query"), TYPES[1:], ids=str)
@pytest.mark.parametrize(("page", "dim"), [(16, 256), (64, 128), (128, 128), (32, 256)])
def test_heads_with_kernels_of_their_own_match(
    page: int, dim: int, cache: torch.dtype, query: torch.dtype, window: int, device: torch.device
) -> None:
    """Window smaller than an image, as large as some, larger than all; pages smaller than a block of keys, and not."""
    step = make_step(Shape(page, 1, 3, dim, cache, query), CHUNKS, Rules(window), seed=window, device=device)
    step.check(image_attention, TOLERANCE[query])


def test_more_query_heads_than_a_tile_has_rows(device: torch.device) -> None:
    step = make_step(Shape(16, 1, 71, 16), [Chunk(4, 14, ((3, 12),))], Rules(6), device=device)
    step.check(image_attention, TOLERANCE[FULL])


def test_more_rows_than_a_tile_in_some_images_alone(device: torch.device) -> None:
    chunks = [Chunk(3, 12, ((6, 10),)), Chunk(40, 160, ((40, 157),)), Chunk(0, 70, ((1, 66),))]
    step = make_step(Shape(32, 1, 2, 24), chunks, Rules(90), empty=1, device=device)
    want = step.check(image_attention, TOLERANCE[FULL])
    # The bound may be larger than any image of the step, as it is in a captured graph.
    loose = replace(step, spans=replace(step.spans, most_rows=step.spans.most_rows + 70))
    assert torch.equal(loose.run(image_attention), want)


@pytest.mark.parametrize("window", [0, 21])
def test_a_rows_bits_do_not_depend_on_the_step(window: int, device: torch.device) -> None:
    """Alone, among others, and computed from a later row on: the same."""
    step = make_step(Shape(16, 1, 3, 64, HALF, HALF), CHUNKS, Rules(window), device=device)
    want = step.run(image_attention)
    for index in (0, 1):
        fields = {name: getattr(step.spans, name)[index : index + 1] for name in FIELDS}
        alone = replace(step.spans, **fields)
        later = replace(alone, rows=alone.rows + 5, counts=alone.counts - 5)
        for spans in (alone, later):
            got = torch.full_like(step.q, 7.0)
            image_attention(step.q, step.k, step.v, step.page_table, spans, out=got, **step.options)
            rows = slice(int(spans.rows), int(spans.rows) + int(spans.counts))
            assert torch.equal(got[rows], want[rows])


def test_a_step_without_images_writes_nothing(device: torch.device) -> None:
    step = make_step(Shape(16, 1, 2, 16), CHUNKS, Rules(), device=device)
    none = step.spans.slots[:0]
    for spans in (replace(step.spans, most_rows=0), type(step.spans)(none, none, none, none, none, 9)):
        out = torch.full_like(step.q, 7.0)
        image_attention(step.q, step.k, step.v, step.page_table, spans, out=out, **step.options)
        assert bool((out == 7.0).all())


def test_what_the_kernel_cannot_read_is_refused(device: torch.device) -> None:
    step = make_step(Shape(16, 2, 3, 32), CHUNKS, Rules(), device=device)
    out = torch.empty_like(step.q)
    wide = replace(step.spans, begins=step.spans.begins.long())
    for changes, text in [
        ({"q": step.q[:, :5], "out": out[:, :5]}, "5 query heads do not divide"),
        ({"q": step.q.half(), "out": out.half()}, "q is torch.float16 but the caches torch.float32"),
        ({"out": out[:-1]}, "out needs the shape"),
        ({"k_scale": torch.ones(2, device=device)}, "an e4m3 cache needs k_scale"),
        ({"spans": wide}, "contiguous int32"),
        ({"page_table": step.page_table.t()}, "page_table needs lines"),
        ({"k_cache": step.k[:, :, :12], "v_cache": step.v[:, :, :12]}, "page size 12"),
    ]:
        given = {"q": step.q, "k_cache": step.k, "v_cache": step.v, "page_table": step.page_table, "spans": step.spans}
        with pytest.raises(ValueError, match=text):
            image_attention(**(given | {"out": out, **step.options} | changes))


REAL_SHAPES = [
    Shape(page, kv_heads, 2, dim, cache, BF16)
    for cache in (BF16, FP8)
    for page, kv_heads, dim in [(16, 4, 256), (64, 8, 256), (64, 16, 128), (128, 4, 256)]
]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 512, 1024])
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_real_shapes_match(shape: Shape, window: int, device: torch.device) -> None:
    """Gemma 3's heads and images of 256 tokens; dependent launch changes no bit."""
    chunks = [
        Chunk(0, 600, ((5, 261), (270, 526))),
        Chunk(4000, 4300, ((4010, 4266),)),
        Chunk(1500, 1700, ((1400, 1656),)),
    ]
    step = make_step(shape, chunks, Rules(window), empty=3, device=device)
    plain = step.check(image_attention, TOLERANCE[BF16])
    enable_pdl(True)
    try:
        assert torch.equal(step.run(image_attention), plain)
    finally:
        enable_pdl(False)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_images(device: torch.device) -> None:
    step = make_step(Shape(64, 4, 2, 256, BF16, BF16), CHUNKS, Rules(32), device=device)
    want, out = step.run(image_attention), torch.full_like(step.q, 7.0)
    spans = replace(step.spans, counts=step.spans.counts.clone())

    def attend() -> None:
        image_attention(step.q, step.k, step.v, step.page_table, spans, out=out, **step.options)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    out.fill_(7.0)
    graph.replay()
    assert torch.equal(out, want)
    out.fill_(7.0)
    spans.counts.zero_()
    graph.replay()
    assert bool((out == 7.0).all())
