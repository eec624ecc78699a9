"""quantity.py: exact quantities and durations."""

from __future__ import annotations

from decimal import Decimal

import pytest

from stoker_operator.spec.quantity import human_bytes, is_quantity, quantity, same_quantity, seconds


@pytest.mark.parametrize(
    ("text", "number"), [("4", 4), ("500m", Decimal("0.5")), ("1.5Gi", 3 * 2**29), ("2k", 2000), ("1Ti", 2**40)]
)
def test_quantities(text: str, number: Decimal) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "Gi", "4 Gi", "-1", "1e3", "4gi", "1Gi\n"])
def test_what_is_no_quantity(text: str) -> None:
    assert not is_quantity(text)
    with pytest.raises(ValueError, match="not a quantity"):
        quantity(text)


@pytest.mark.parametrize(("left", "right"), [("1000m", "1"), ("1Gi", "1024Mi"), (4, "4"), ("x", "x")])
def test_the_same_quantity_in_two_notations(left: object, right: object) -> None:
    assert same_quantity(left, right)


@pytest.mark.parametrize(("left", "right"), [("1", "2"), ("x", "y"), (None, "1"), ("1G", "1Gi")])
def test_different_quantities(left: object, right: object) -> None:
    assert not same_quantity(left, right)


def test_durations() -> None:
    assert [seconds(text) for text in ("15s", "2m", "1h")] == [15, 120, 3600]
    with pytest.raises(ValueError, match="not a duration"):
        seconds("15")


@pytest.mark.parametrize(("count", "text"), [(5, "5 B"), (98_362_432, "98.4 MB"), (15_231_233_024, "15.2 GB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
