"""How AWQ, GPTQ and compressed-tensors files hold integer weights: which tensors, of which shapes, and their values.

    AWQ         qweight int32 [K, N/8], eight rows of the weight a word, in the order 0 2 4 6 1 3 5 7;
                qzeros [G, N/8] likewise; scales [G, N]
    GPTQ        qweight int32 [K·b/32, N], columns of the weight a word, in order;
                qzeros [G, N·b/32], stored less one; scales [G, N]; g_idx [K]
    compressed  weight_packed int32 [N, K·b/32]; weight_zero_point [N·b/32, G]; weight_scale [N, G]; weight_shape;
                weight_g_idx [K]

An order of columns (g_idx, the group of each) is loaded where the configuration says that there is one; elsewhere it is
there to say that there is none.

Invariants: `unpack` gives codes [N, K], scales and zero points [G, N], and the order of columns, on the device of the
tensors; nothing here reads a file.
Knows nothing of where a weight goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_runtime.errors import ModelError
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint, Packing
from stoker_runtime.models.quantization.integer_scheme import IntegerScheme
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES, WORD_DTYPES

_ORDER = {Packing.GPTQ: "g_idx", Packing.GPTQ_V2: "g_idx", Packing.COMPRESSED: "weight_g_idx"}
_ORDERED = {
    Packing.GPTQ: "desc_act true", Packing.GPTQ_V2: "desc_act true", Packing.COMPRESSED: "actorder group",
}  # fmt: skip
# Half byte i of an AWQ word is row _AWQ[i] of eight; column c stands in half byte _AWQ_PLACE[c].
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An [N, K] weight: uint8 codes, scales [G, N], uint8 zero points [G, N] or None, int32 order [K] or None."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None


def tensor_shapes(checkpoint: IntegerCheckpoint, n: int, k: int) -> dict[str, tuple[int, ...]]:
    """Suffix → shape of each tensor that an [n, k] weight must have. Raises ModelError where words are not filled."""
    scheme = checkpoint.scheme
    per_word, groups = scheme.per_word, -(-k // scheme.columns(k))
    if n % per_word or k % per_word:
        raise ModelError(f"a weight of {n} × {k} does not fill words of {per_word} codes", param="quantization_config")
    if checkpoint.packing is Packing.AWQ:
        return {"qweight": (k, n // per_word), "qzeros": (groups, n // per_word), "scales": (groups, n)}
    if checkpoint.packing is not Packing.COMPRESSED:
        found = {"qweight": (k // per_word, n), "qzeros": (groups, n // per_word), "scales": (groups, n)}
        return found | ({"g_idx": (k,)} if scheme.order else {})
    found = {"weight_packed": (n, k // per_word), "weight_scale": (n, groups)}
    if scheme.zeros:
        found["weight_zero_point"] = (n // per_word, groups)
    return found | ({"weight_g_idx": (k,)} if scheme.order else {})


def order_suffix(packing: Packing) -> str | None:
    """The tensor that has the group of each column; None: no column has another than its place says."""
    return _ORDER.get(packing)


def optional_suffixes(packing: Packing) -> tuple[str, ...]:
    """Tensors that a weight may have besides: they say what the scheme says already, an order once it is checked."""
    return {Packing.AWQ: (), Packing.COMPRESSED: ("weight_shape", "weight_g_idx")}.get(packing, ("g_idx",))


def encodings(suffix: str) -> tuple[str, ...]:
    """safetensors' dtypes that a tensor may have."""
    return tuple(PLAIN_DTYPES if suffix.endswith(("scale", "scales")) else WORD_DTYPES)


def unpack(checkpoint: IntegerCheckpoint, tensors: Mapping[str, Tensor], name: str) -> Unpacked:
    """The values of module `name`. Raises ModelError, naming the tensor, for an order that is no permutation."""
    scheme = checkpoint.scheme
    if checkpoint.packing is Packing.AWQ:
        place = torch.tensor(_AWQ_PLACE, device=tensors["qweight"].device)
        codes = _codes(tensors["qweight"], 4)[..., place].flatten(1).t()
        return Unpacked(codes, tensors["scales"], _codes(tensors["qzeros"], 4)[..., place].flatten(1), None)
    if checkpoint.packing is Packing.COMPRESSED:
        codes, scale = _codes(tensors["weight_packed"], scheme.bits).flatten(1), tensors["weight_scale"].t()
        zero = None
        if scheme.zeros:
            zero = _codes(tensors["weight_zero_point"], scheme.bits).permute(1, 0, 2).flatten(1)
    else:
        codes = _codes(tensors["qweight"], scheme.bits).permute(1, 0, 2).flatten(1)
        scale = tensors["scales"]
        zero = _codes(tensors["qzeros"], scheme.bits).flatten(1) + int(checkpoint.packing is Packing.GPTQ)
    suffix = _ORDER[checkpoint.packing]
    order = column_order(tensors[suffix], checkpoint, f"{name}.{suffix}") if scheme.order else None
    return Unpacked(codes if order is None else codes[:, order.long()], scale, zero, order)


def values(checkpoint: IntegerCheckpoint, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The numbers of one weight, fp32 [N, K], columns as its activations have them. Raises as `unpack` does."""
    bits, scheme = unpack(checkpoint, tensors, name), checkpoint.scheme
    k = bits.codes.shape[1]
    group = torch.arange(k, device=bits.codes.device) // scheme.columns(k)
    zero = float(1 << scheme.bits - 1) if bits.zero is None else bits.zero.float().t()[:, group]
    found = (bits.codes.float() - zero) * bits.scale.float().t()[:, group]
    if bits.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, bits.order.long(), found)


def in_scheme(piece: Unpacked, own: IntegerScheme, to: IntegerScheme) -> Unpacked:
    """A weight in the scheme `own` as the same numbers in `to`, of as many bits or more, of groups that fill its own,
    and with zero points or as it is.
    """
    codes, scale, zero = piece.codes, piece.scale, piece.zero
    k = codes.shape[1]
    if to.zeros and zero is None:
        zero = torch.full_like(scale, 1 << own.bits - 1, dtype=torch.uint8)
    elif not to.zeros and to.bits > own.bits:
        codes = codes + ((1 << to.bits - 1) - (1 << own.bits - 1))
    if to.columns(k) != own.columns(k):
        within = torch.arange(0, k, to.columns(k), device=codes.device) // own.columns(k)
        scale, zero = scale[within], None if zero is None else zero[within]
    return Unpacked(codes, scale, zero, piece.order)


def in_order(pieces: Sequence[Unpacked], rows: Tensor) -> Unpacked:
    """Weights one behind the other as one, its rows those in the order `rows`; of columns the first one's order."""
    zeros = [piece.zero for piece in pieces if piece.zero is not None]
    return Unpacked(
        torch.cat([piece.codes for piece in pieces])[rows],
        torch.cat([piece.scale for piece in pieces], dim=1)[:, rows],
        torch.cat(zeros, dim=1)[:, rows] if zeros else None,
        pieces[0].order,
    )


def column_order(groups: Tensor, checkpoint: IntegerCheckpoint, tensor: str) -> Tensor:
    """The order of columns in which those of a group (int [K], a group a column) are neighbours; int32 [K].

    Raises ModelError, naming the `tensor`, where a group has not as many columns as the scheme says, or where columns
    are ordered against what the scheme says.
    """
    scheme, k = checkpoint.scheme, groups.shape[0]
    order = torch.argsort(groups, stable=True)
    columns = scheme.columns(k)
    expected = torch.arange(k, device=groups.device) // columns
    if not torch.equal(groups[order].long(), expected):
        raise ModelError(
            f"tensor {tensor} puts columns into other groups than {-(-k // columns)} of {columns} each; an order of "
            f"columns by {checkpoint.method} is a permutation of these, of the group_size of quantization_config.",
            param="quantization_config",
        )
    if not scheme.order and not torch.equal(groups.long(), expected):
        raise ModelError(
            f"tensor {tensor} orders columns by activation, but quantization_config says that {checkpoint.method} did "
            f"not; with {_ORDERED[checkpoint.packing]} there, the order is read.",
            param="quantization_config",
        )
    return order.to(torch.int32)


def _codes(words: Tensor, bits: int) -> Tensor:
    """int32 words [A, B] → uint8 codes [A, B, codes a word], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
