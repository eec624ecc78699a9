"""sleeping.py: schedules that the API server lets through and that name no moments; the rest is in bad_specs.yaml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.spec.service import SpecError, parse
from stoker_operator.spec.sleeping import Hours


def scaling(**hours: Any) -> dict[str, Any]:
    return {"min": 0, "max": 5, "scaleToZero": {"schedule": [hours]}}


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("0 0 30 2 *", "'0 0 30 2 *' never comes: Bad day-of-month"),
        ("0 18-8 * * *", "'0 18-8 * * *' never comes: Bad hour"),
        ("0 8 * * fri-mon", "'0 8 * * fri-mon' never comes: Bad day-of-week"),
    ],
)
def test_a_moment_that_never_comes_is_refused(raw: Callable[..., dict[str, Any]], start: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw(autoscaling=scaling(start=start, end="7 7 * * *")))
    assert f"spec.autoscaling.scaleToZero.schedule[0].start: {words}" in str(caught.value)


def test_hours_have_the_defaults_of_the_crd(raw: Callable[..., dict[str, Any]]) -> None:
    built = parse(raw(autoscaling=scaling(start="1 2 * * *", end="3 4 * * *")))
    assert built.autoscaling is not None
    assert built.autoscaling.scale_to_zero is not None
    assert built.autoscaling.scale_to_zero.schedule == (Hours("1 2 * * *", "3 4 * * *", "UTC", 1),)
