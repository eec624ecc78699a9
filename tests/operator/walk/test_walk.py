"""Random walks: what may befall a service, in any order, on a real API server with pods as their statuses would say.

STOKER_WALKS says how many histories are walked, STOKER_WALK_SEED which; `make walk` is a long run. A history that fails
is printed as the list that KEPT takes; what is there failed once, with a fault that was found or put back in.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.operator.walk.arena import Arena
from tests.operator.walk.steps import STEPS, Step
from tests.operator.walk.walking import walk_all

pytestmark = [pytest.mark.apiserver]
WALKS = int(os.environ.get("STOKER_WALKS") or "1")
SEED = os.environ.get("STOKER_WALK_SEED") or ""
AT_ONCE = 6
KEPT: dict[str, list[Step]] = {
    "every step once": [(name, 1) for name in STEPS],
    "memory that no node has": [("memory", 2), ("memory", 1)],
    "a selector that no node has": [("a_selector_without_a_node", 0), ("another_revision", 4)],
    "a wrong image, then a lost node": [("a_wrong_image", 0), ("a_node_is_lost", 0), ("time_passes", 1)],
    "rot that is not mended yet": [("a_file_rots", 0), ("fetches_fail", 2), ("time_passes", 2), ("a_wrong_image", 1)],
    "two that cannot run at once": [("a_wrong_image", 1), ("memory", 2), ("another_model", 1), ("fetches_fail", 2)],
    "groups and none": [("nodes", 1), ("another_revision", 3), ("nodes", 2), ("a_worker_is_deleted", 0), ("nodes", 3)],
    "an evicted pod names the volume of the model before": [("a_pod_is_struck", 0), ("another_model", 1)],
}
HISTORY = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 11)), min_size=4, max_size=12)


@pytest.fixture
async def arena(control_plane: Path, groups_defined: None) -> AsyncIterator[Arena]:
    opened = await Arena.open()
    yield opened
    await opened.close()


def drawn(count: int) -> list[list[Step]]:
    """So many histories: always the same ones, unless a seed is given."""
    found: list[list[Step]] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not SEED,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(history=HISTORY)
    def draw(history: list[Step]) -> None:
        found.append(history)

    (seed(SEED)(draw) if SEED else draw)()
    return found


@pytest.mark.timeout(300 + 30 * WALKS)
async def test_whatever_befalls_a_service(arena: Arena) -> None:
    faults = await walk_all(arena, drawn(WALKS), AT_ONCE)
    assert not faults, "\n\n".join(map(str, faults))


@pytest.mark.timeout(900)
async def test_what_failed_once(arena: Arena) -> None:
    faults = await walk_all(arena, KEPT.values(), AT_ONCE)
    assert not faults, "\n\n".join(map(str, faults))
