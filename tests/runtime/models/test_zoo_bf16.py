"""Every architecture of the table in BF16: no further from fp32 than transformers' own model in BF16 is.

Weights are rounded beforehand, and are those of all three: what is compared is how their layers compute.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.models.plain_models import PLAIN
from tests.runtime.models.test_zoo import ROWS, SEED, by_kind, save_random
from torch import Tensor

# Chosen by numbers that stay in 32 bits, in what transformers loads as well.
EXACT = "e_score_correction_bias"
MOST = 1.5


@pytest.mark.matrix("kind", take=2)
@pytest.mark.parametrize(("kind", "name"), by_kind(name for name in ROWS if name not in PLAIN))
def test_bf16_errs_no_more_than_transformers(kind: str, name: str, tmp_path: Path, paged_model: Any) -> None:
    print(f"seed {SEED}")
    theirs, file = save_random(name, tmp_path), tmp_path / "model.safetensors"
    saved = {key: rounded(tensor) if EXACT not in key else tensor for key, tensor in load_file(file).items()}
    save_file(saved, file)
    for parameter in theirs.parameters():
        parameter.data = rounded(parameter.data)
    rng = random.Random(SEED)
    exact = paged_model(str(tmp_path), slots=8)
    ids = [[rng.randrange(3, exact.spec.vocab) for _ in range(40)] for _ in range(8)]
    with torch.no_grad():
        reference = theirs(torch.tensor(ids)).logits
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16()
        half = theirs(torch.tensor(ids)).logits.float()
    ours = paged_model(str(tmp_path), slots=8, dtype=torch.bfloat16).step(list(enumerate(ids)), all_logits=True)
    # Of a token in the middle: where two experts weigh about alike, rounding chooses, and another gives other logits.
    errors = ((each - reference).abs().mean(dim=-1) for each in (torch.stack(ours).float(), half))
    found, own = (each.median() for each in errors)
    assert 0 < found <= MOST * own


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()
