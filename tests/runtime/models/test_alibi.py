"""The slopes of ALiBi against the function of transformers that makes MPT's: its model knows no bound but 8."""

from __future__ import annotations

import random

import pytest
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from stoker_runtime.models.architectures.alibi import alibi_slopes


@pytest.mark.parametrize("seed", range(8))
def test_slopes_are_the_published_ones_of_any_bound(seed: int) -> None:
    chosen = random.Random(seed)
    heads, most = chosen.randint(1, 112), chosen.choice((3, 4, 5, 11, 16))
    published = -build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0]
    assert alibi_slopes(heads, most) == pytest.approx(published.tolist(), rel=1e-6)
