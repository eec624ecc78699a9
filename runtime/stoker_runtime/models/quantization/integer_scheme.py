"""How a linear's weight is held in integers: bits, groups, zero points, order; and what that takes of memory.

Invariants: frozen plain data, torch-free; `parts` is what allocation, loading and byte counts all walk.
Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WORD_BITS = 32
EXPERTS_BLOCK = 32  # columns that rows of experts, and their groups, have whole multiples of
Part = Literal["data", "scale", "zero", "order"]


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """`group` columns share a scale, 0: the whole row. `zeros`: groups have zero points. `order`: columns are
    permuted.
    """

    bits: int
    group: int
    zeros: bool
    order: bool = False

    @property
    def kind(self) -> Literal["int4", "int8"]:
        """The kind of a parameter in this scheme."""
        return "int4" if self.bits == 4 else "int8"

    @property
    def per_word(self) -> int:
        """Codes that share a word of a file: where a weight may be cut."""
        return WORD_BITS // self.bits

    def columns(self, k: int) -> int:
        """Columns of a group of a weight with `k` of them."""
        return min(self.group or k, k)

    def parts(self, n: int, k: int) -> dict[Part, tuple[tuple[int, int], int]]:
        """Each tensor of an [n, k] weight: its shape, and bytes an element; 0 bytes: those of the model's dtype."""
        groups = -(-k // self.columns(k))
        found: dict[Part, tuple[tuple[int, int], int]] = {
            "data": ((n, k * self.bits // 8), 1),
            "scale": ((groups, n), 0),
        }
        if self.zeros:
            found["zero"] = ((groups, n), 1)
        if self.order:
            found["order"] = ((1, k), 4)
        return found

    def sizes(self, n: int, k: int, item_bytes: int) -> list[int]:
        """Bytes of each part of an [n, k] weight whose model's dtype has `item_bytes`."""
        return [rows * columns * (size or item_bytes) for (rows, columns), size in self.parts(n, k).values()]

    @property
    def grouping(self) -> str:
        """What numbers share a scale, in words."""
        return f"groups of {self.group}" if self.group else "whole rows"

    def experts_sizes(self, n: int, k: int, item_bytes: int) -> tuple[int, int]:
        """Bytes of the codes of stacked experts' [n, k] rows, and of their groups' scales beside zero points."""
        return n * k * self.bits // 8, -(-k // self.columns(k)) * n * 2 * item_bytes

    @property
    def experts_block(self) -> int:
        """Columns that rows of experts have whole multiples of."""
        return EXPERTS_BLOCK

    @property
    def widens_experts(self) -> bool:
        """Whether experts become 16 bits when they are loaded: of columns in an order of each expert's own, x would
        have to be ordered anew for each.
        """
        return self.order

    def experts_problem(self, k: int) -> str | None:
        """Why experts with rows of `k` columns are not multiplied in this scheme; None: they are, or are widened."""
        if self.widens_experts:
            return None
        for what, size in (("rows", k), ("groups", self.columns(k))):
            if size % EXPERTS_BLOCK:
                return f"{what} have {size} columns, no whole blocks of {EXPERTS_BLOCK}"
        return None


def common(schemes: Sequence[IntegerScheme]) -> IntegerScheme:
    """The scheme of fewest bits and widest groups that holds weights of all `schemes` exactly; their order of columns
    is one. One scheme is itself.
    """
    return IntegerScheme(
        max(each.bits for each in schemes),
        math.gcd(*(each.group for each in schemes)),
        any(each.zeros for each in schemes),
        schemes[0].order,
    )


# What `--quantization w4` makes of 16-bit weights at load.
IN_SITU = IntegerScheme(bits=4, group=128, zeros=True)
