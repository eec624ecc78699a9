"""Packing of slot updates, on the host."""

from __future__ import annotations

import numpy as np

from stoker_kernels.slots import pack_updates


def test_nothing_packs_to_no_rows() -> None:
    assert pack_updates().shape == (0, 3)


def test_places_and_their_order() -> None:
    packed = pack_updates([(3, 2, (10, 11))], [(3, 99)], [(4, 7)])
    assert packed.dtype == np.int32
    assert packed.tolist() == [[3, 2, 10], [3, 3, 11], [3, -1, 99], [4, -2, 7]]


def test_the_last_mention_of_a_place_wins() -> None:
    packed = pack_updates([(0, 0, (1, 2, 3)), (0, 1, (9,))], [(0, 5), (1, 6), (0, 7)])
    places = {(slot, index): value for slot, index, value in packed.tolist()}
    assert len(packed) == len(places) == 5
    assert places == {(0, 0): 1, (0, 1): 9, (0, 2): 3, (0, -1): 7, (1, -1): 6}
