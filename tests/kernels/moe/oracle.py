"""Mixtures of experts as plainly as loops can say them, in fp64: independent of the package's own reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker_kernels.moe import ExpertActivation, ExpertWeights, Routing, quantize_nvfp4


def chosen(logits: list[float], routing: Routing, bias: list[float] | None) -> list[tuple[int, float]]:
    """(expert, weight) of one token, best first."""
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits, routing)
    if routing.scoring == "softmax":
        total = sum(math.exp(value - max(logits)) for value in logits)
        scores = [math.exp(value - max(logits)) / total for value in logits]
    else:
        scores = [1.0 / (1.0 + math.exp(-value)) for value in logits]
    corrected = [score + (bias[expert] if bias else 0.0) for expert, score in enumerate(scores)]
    size = len(logits) // routing.groups
    worth = []
    for group in range(routing.groups):
        members = sorted(corrected[group * size : (group + 1) * size], reverse=True)
        worth.append(sum(members[: 2 if routing.group_score == "top2" else 1]))
    groups = sorted(range(routing.groups), key=lambda group: -worth[group])[: routing.top_groups]
    allowed = [expert for expert in range(len(logits)) if expert // size in groups]
    best = sorted(allowed, key=lambda expert: -corrected[expert])[: routing.top_k]
    norm = sum(scores[expert] for expert in best) if routing.renormalize else 1.0
    return [(expert, scores[expert] / norm * routing.scale) for expert in best]


def _sparsemixer(logits: list[float], routing: Routing) -> list[tuple[int, float]]:
    left = dict(enumerate(logits))
    found = []
    for _ in range(routing.top_k):
        expert = max(left, key=lambda each: left[each])
        best = left[expert]
        near = [value for value in left.values() if (best - value) / max(abs(value), best) <= 2 * routing.jitter]
        found.append((expert, routing.scale / sum(math.exp(value - best) for value in near)))
        del left[expert]
    return found


def mixed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    of: ExpertWeights,
    activation: ExpertActivation,
    limit: float,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """What a mixture gives, fp64 throughout: [T, H]."""
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(x.double()):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert < 0:
                continue
            both = of.gate_up[expert].double() @ row
            if of.gate_up_bias is not None:
                both = both + of.gate_up_bias[expert].double()
            first, second = both[: of.ffn], both[of.ffn :]
            if activation == "relu2":
                inner = first.clamp(min=0) ** 2
            elif activation == "clamped":
                first, second = first.clamp(max=limit), second.clamp(-limit, limit)
                inner = first * torch.sigmoid(1.702 * first) * (second + 1)
            else:
                inner = first * torch.sigmoid(first) * second
            given = of.down[expert].double() @ inner
            if of.down_bias is not None:
                given = given + of.down_bias[expert].double()
            result[token] += weight * given
    if shared is not None:
        result += shared.double() * (1.0 if gate is None else torch.sigmoid(gate.double()))
    return result


def random_experts(
    experts: int, ffn: int, hidden: int, dtype: torch.dtype, device: torch.device, *, bias: bool = False, seed: int = 0,
    gated: bool = True,
) -> ExpertWeights:  # fmt: skip
    """Experts whose outputs are of order one for inputs of order one."""
    generator, up = torch.Generator().manual_seed(seed), 2 * ffn if gated else ffn

    def draw(*shape: int, spread: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * spread).to(device, dtype)

    return ExpertWeights(
        draw(experts, up, hidden, spread=hidden**-0.5),
        draw(experts, hidden, ffn, spread=ffn**-0.5),
        gate_up_bias=draw(experts, up, spread=0.3) if bias else None,
        down_bias=draw(experts, hidden, spread=0.3) if bias else None,
    )


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of codes uint8 [R, K / 2], the lower column in the lower half, and exponents uint8 [R, K / 32]: fp64."""
    return e2m1_numbers(blocks) * torch.pow(2.0, scales.double() - 127).repeat_interleave(32, dim=1)


def nvfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of such codes and of e4m3 as uint8 [R, K / 16], the factor left out: fp64."""
    exponent, mantissa = (scales >> 3 & 15).double(), (scales & 7).double()
    size = torch.where(exponent > 0, (8 + mantissa) * torch.pow(2.0, exponent - 10), mantissa / 512)
    return e2m1_numbers(blocks) * torch.where(scales > 127, -size, size).repeat_interleave(16, dim=1)


def e2m1_numbers(blocks: Tensor) -> Tensor:
    """Numbers of codes alone: fp64 [R, K]."""
    spoken = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1).long()
    return spoken[codes & 7] * (1 - 2 * (codes >> 3))


def nvfp4_experts(dense: ExpertWeights) -> ExpertWeights:
    """Experts in fp32, each matrix rounded to NVFP4 by the package and decoded here."""

    def numbers(matrix: Tensor) -> Tensor:
        blocks, scales, factor = quantize_nvfp4(matrix)
        return (nvfp4_numbers(blocks, scales) * factor.double()).float()

    up, down = (torch.stack([numbers(each) for each in matrices]) for matrices in (dense.gate_up, dense.down))
    return ExpertWeights(up, down, gate_up_bias=dense.gate_up_bias, down_bias=dense.down_bias)


def int4_code(row: list[int], column: int) -> int:
    """The code of a column in the bytes of a row of four-bit integers, by the layout's words alone."""
    columns, start = 2 * len(row), 0
    while True:
        size = 256 if columns - start >= 256 else 1 << (columns - start).bit_length() - 1
        if column < start + size:
            break
        start += size
    place, word = divmod(column - start, size // 8)
    byte = start // 2 + 4 * word + 2 * (place % 2) + place // 4
    return row[byte] >> 4 * (place // 2 % 2) & 15


def int4_numbers(data: Tensor, scale: Tensor, group: int) -> Tensor:
    """fp64 [R, K] of rows of bytes [R, K / 2] and of scales beside zero points [groups, R, 2]."""
    rows = [[int4_code(row, column) for column in range(2 * len(row))] for row in data.tolist()]
    codes = torch.tensor(rows, dtype=torch.float64, device=data.device)
    at = torch.arange(codes.shape[1], device=data.device) // (group or codes.shape[1])
    settings = scale.double()[at]
    return (codes - settings[..., 1].t()) * settings[..., 0].t()


def int8_numbers(data: Tensor, scale: Tensor, group: int) -> Tensor:
    """fp64 [R, K] of rows of codes, a byte each, and of scales beside zero points [groups, R, 2]."""
    columns = data.shape[1]
    numbers = torch.empty(data.shape, dtype=torch.float64, device=data.device)
    for column in range(columns):
        settings = scale[column // (group or columns)].double()
        numbers[:, column] = (data[:, column].double() - settings[:, 1]) * settings[:, 0]
    return numbers


def integer_experts(weights: ExpertWeights) -> ExpertWeights:
    """The same experts in fp32, decoded number by number."""
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    numbers = int4_numbers if weights.kind == "int4" else int8_numbers
    up, down = (
        torch.stack([numbers(*each, weights.group) for each in zip(data, scale, strict=True)]).float()
        for data, scale in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale))
    )
    return ExpertWeights(up, down, gate_up_bias=weights.gate_up_bias, down_bias=weights.down_bias)


def code_at(halves: Tensor, place: int) -> Tensor:
    """The codes at one place of words of e2m1, whose halves are int16 [S, W, 2], as kernels read them: bf16 [S, W], all
    of them a power of two off.
    """
    half, field = halves[:, :, place % 2].int() & 0xFFFF, place // 2
    bits = (half << 3 * field) & 0x81C0
    if field == 3:
        bits = (half << 1) & 0x8000 | (half >> 3) & 0x180 | (half >> 7) & 0x40
    # Two's complement, for torch has no unsigned numbers of 16 bits.
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)
