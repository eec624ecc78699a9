"""Kubernetes quantities and durations: "32Gi", "500m", "15s".

Invariants: exact arithmetic (Decimal), so that 0.1 + 0.2 never decides whether an object is written.
Knows nothing of what is being measured.
"""

from __future__ import annotations

import re
from decimal import Decimal

GIB = 2**30
_SUFFIXES = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50),
}  # fmt: skip
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
DURATION_PATTERN = r"^[0-9]{1,6}(s|m|h)$"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def is_quantity(text: str) -> bool:
    """Whether `text` is a quantity in the notation that InferenceServices allow."""
    return re.fullmatch(QUANTITY_PATTERN[1:-1], text) is not None


def quantity(text: str) -> Decimal:
    """The number behind "500m", "32Gi", "4". Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2] or ""]


def same_quantity(left: object, right: object) -> bool:
    """Whether two fields hold the same quantity, however the API server rewrote it ("1000m" is "1")."""
    if left == right:
        return True
    try:
        return quantity(str(left)) == quantity(str(right))
    except ValueError:
        return False


def seconds(text: str) -> int:
    """The seconds of a duration such as "15s", "2m" or "1h". Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})(s|m|h)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration")
    return int(match[1]) * _SECONDS[match[2]]


def human_bytes(count: int) -> str:
    """Bytes for a person: "98.1 MB", "15.2 GB"."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
