import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_kernels.gemm.cluster_split import ClusterSplit, MulticastSplit

shapes = st.tuples(st.integers(1, 400), st.integers(8, 60), st.integers(1, 132), st.integers(1, 8))


def cut(shape: tuple[int, int, int, int]) -> ClusterSplit | None:
    try:
        return ClusterSplit(*shape)
    except ValueError:
        return None


@given(shapes)
def test_every_k_block_of_every_tile_belongs_to_one_cta(shape: tuple[int, int, int, int]) -> None:
    part = cut(shape)
    if part is None:
        return
    seen = [
        (segment.tile, k_block)
        for cta in range(part.ctas)
        for segment in part.segments(cta)
        for k_block in range(segment.begin, segment.end)
    ]
    assert len(seen) == len(set(seen)) == part.tiles * part.k_blocks
    assert set(seen) == {(tile, k_block) for tile in range(part.tiles) for k_block in range(part.k_blocks)}


@given(shapes)
def test_a_shared_tile_stays_in_its_cluster_and_comes_first(shape: tuple[int, int, int, int]) -> None:
    part = cut(shape)
    if part is None:
        return
    for cluster in range(part.clusters):
        own = [part.segments(cluster * part.size + rank) for rank in range(part.size)]
        assert len({len(segments) for segments in own}) == 1
        partial = [
            (i, segment.tile)
            for segments in own
            for i, segment in enumerate(segments)
            if segment.end - segment.begin < part.k_blocks
        ]
        assert {i for i, _ in partial} <= {0}
        assert len({tile for _, tile in partial}) <= 1
        assert len(partial) in (0, part.size)
        assert all(segment.end > segment.begin for segments in own for segment in segments)


def test_clusters_differ_by_at_most_one_tile() -> None:
    part = ClusterSplit(592, 28, 66, 2)
    loads = [sum(s.end - s.begin for s in part.segments(cta)) for cta in range(part.ctas)]
    assert {min(loads), max(loads)} == {8 * 28 // 2, 9 * 28 // 2}


@pytest.mark.parametrize("shape", [(4, 28, 5, 2), (10, 2, 10, 3), (36, 28, 16, 4)])
def test_cuts_that_the_kernel_lacks_are_refused(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"cut|shared"):
        ClusterSplit(*shape)


def test_multicast_clusters_hold_every_tile() -> None:
    assert MulticastSplit(28, 56, 2, 4).ctas == 28 * 4
    assert MulticastSplit(29, 56, 2, 4).ctas == 30 * 4


@pytest.mark.parametrize(("k_blocks", "share", "split"), [(3, 2, 4), (56, 1, 1)])
def test_multicast_cuts_that_the_kernel_lacks_are_refused(k_blocks: int, share: int, split: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        MulticastSplit(28, k_blocks, share, split)
