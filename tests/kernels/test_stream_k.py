import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_kernels.stream_k import StreamK

shapes = st.tuples(st.integers(1, 400), st.integers(1, 60), st.integers(1, 264)).filter(lambda s: s[2] <= s[0] * s[1])


@given(shapes)
def test_every_unit_belongs_to_one_cta(shape: tuple[int, int, int]) -> None:
    part = StreamK(*shape)
    owners = [cta for cta in range(part.ctas) for _ in range(part.begin_of(cta), part.begin_of(cta + 1))]
    assert owners == [part.cta_of(unit) for unit in range(part.units)]
    sizes = [part.begin_of(cta + 1) - part.begin_of(cta) for cta in range(part.ctas)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(shapes)
def test_segments_cover_each_tile_once_and_contributors_are_those_that_hold_one(shape: tuple[int, int, int]) -> None:
    part = StreamK(*shape)
    held: dict[int, list[tuple[int, int, int]]] = {}
    for cta in range(part.ctas):
        for segment in part.segments(cta):
            held.setdefault(segment.tile, []).append((segment.begin, segment.end, cta))
    assert sorted(held) == list(range(part.tiles))
    for tile, pieces in held.items():
        assert [cta for _, _, cta in pieces] == list(part.contributors(tile))
        ends = [0, *(end for _, end, _ in pieces)]
        assert [begin for begin, _, _ in pieces] == ends[:-1]
        assert ends[-1] == part.k_blocks


@given(shapes)
def test_no_two_shared_tiles_meet_in_a_slot(shape: tuple[int, int, int]) -> None:
    part = StreamK(*shape)
    used = [
        part.slot_of(cta, segment.tile)
        for cta in range(part.ctas)
        for segment in part.segments(cta)
        if (segment.begin, segment.end) != (0, part.k_blocks)
    ]
    assert len(used) == len(set(used))
    assert all(0 <= slot < 2 * part.ctas for slot in used)


@given(shapes)
def test_whole_tiles_come_last(shape: tuple[int, int, int]) -> None:
    part = StreamK(*shape)
    for cta in range(part.ctas):
        whole = [(s.begin, s.end) == (0, part.k_blocks) for s in part.segments(cta)]
        assert whole[2:] == [True] * len(whole[2:])


def test_more_ctas_than_units_are_refused() -> None:
    with pytest.raises(ValueError, match="2 units cannot be cut over 3 CTAs"):
        StreamK(1, 2, 3)
