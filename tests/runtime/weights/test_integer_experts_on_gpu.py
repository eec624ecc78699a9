"""Experts in integers of four and of eight bits on a GPU, against the same engine on the CPU, whose oracle is
`test_integer_experts.py`'s. Rounding decides between experts that a random router holds for equal, and another expert
is another result: of all rows one in ten may be so.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.weights.test_integer_experts import FORMATS, INT8_CONFIG, int8, write
from tests.runtime.weights.test_quantized_on_gpu import ROUNDED_TOLERANCE, TOLERANCE

SEED = int(os.environ.get("SEED", random.randrange(2**32)))
IGNORED = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
WAYS = FORMATS | {f"w8a8-{kind}": (kind, INT8_CONFIG | {"ignore": IGNORED}, int8) for kind in ("qwen", "shared")}
KINDS = {"dense", "int4", "int8", "int8_channel"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_a_checkpoint_of_a_mixture_gives_the_hosts_logits(name: str, tmp_path: Path, paged_model: Any) -> None:
    """Prompts, decodes, and a chunk beside a decode."""
    print(f"SEED={SEED}")
    folder, _ = write(tmp_path, WAYS[name])
    method = WAYS[name][1]["quant_method"]
    gpu, host = (
        paged_model(str(folder), quantization=method, dtype=torch.bfloat16, device=torch.device(device), max_len=128)
        for device in ("cuda", "cpu")
    )
    kinds = {each.mixture.experts.kind for each in gpu.decoder.weights.layers if each.mixture is not None}
    assert kinds == {each.mixture.experts.kind for each in host.decoder.weights.layers if each.mixture is not None}
    assert kinds <= KINDS
    assert (kinds == {"dense"}) == ("act-order" in name)
    tolerance = ROUNDED_TOLERANCE if name.startswith("w8a8") else TOLERANCE
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3, 104) for _ in range(count)] for count in (40, 1, 100)]
    errors = []
    for work in (list(enumerate(prompts)), [(0, [5]), (1, [6]), (2, [7])], [(0, [8]), (1, prompts[0])]):
        for ours, expected in zip(gpu.step(work, all_logits=True), host.step(work, all_logits=True), strict=True):
            ours, expected = ours.float().cpu(), expected.float().cpu()
            errors.append((ours - expected).norm(dim=1) / expected.norm(dim=1))
    assert len(rows := torch.cat(errors)) == 40 + 1 + 100 + 3 + 1 + 40
    assert rows.quantile(0.9) < tolerance, rows
