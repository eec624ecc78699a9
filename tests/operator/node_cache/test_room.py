"""node_cache/room.py: what is given up, for random disks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.node_cache.room import Bounds, Stored, give_up

STORED = st.builds(
    Stored,
    folder=st.sampled_from(["a.1", "b.2"]),
    name=st.integers(0, 10**6).map(lambda number: f"sha256-{number}"),
    bytes=st.integers(0, 100),
    used=st.floats(0, 100),
    digest=st.sampled_from(["", "sha256:x"]),
)


@given(st.lists(STORED, unique_by=lambda item: (item.folder, item.name)), st.data())
def test_it_fits_afterwards_and_no_more_is_given_up_than_must_be(stored: list[Stored], data: st.DataObject) -> None:
    held = frozenset(
        (item.folder, item.name) for item in data.draw(st.lists(st.sampled_from(stored)) if stored else st.just([]))
    )
    needed, limit, free, reserved = (data.draw(st.integers(0, 400)) for _ in range(4))
    chosen = give_up(stored, held, needed, Bounds(limit, free, reserved))

    def fits(gone: list[Stored]) -> bool:
        freed = sum(item.bytes for item in gone)
        taken = sum(item.bytes for item in stored) - freed
        return taken + reserved + needed <= limit and reserved + needed <= free + freed

    idle = [item for item in stored if (item.folder, item.name) not in held]
    if chosen is None:
        assert not fits(idle)
        return
    assert fits(chosen)
    assert set(chosen) <= set(idle)
    assert not chosen or not fits(chosen[:-1])
    kept = [item for item in idle if item not in chosen]
    for gone in chosen:
        assert all((bool(gone.digest), gone.used) <= (bool(item.digest), item.used) for item in kept)
