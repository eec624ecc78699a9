"""What the benchmark's oracle makes of weights and positions, against transformers and plain arithmetic."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_kernels.block_gemm import decode_blocks, store_planes
from stoker_kernels.fp4_gemm import dequantize_fp4, store_fp4
from stoker_kernels.fragment_gemm import to_fragments
from stoker_kernels.int8_gemm import int8_linear
from stoker_kernels.moe import ExpertWeights
from stoker_kernels.quant import (
    BLOCK_FORMATS,
    PLANE_KINDS,
    BlockRows,
    BlockWeight,
    Fp4Weight,
    Int8Weight,
    IntegerWeight,
    LinearWeight,
    block_row_bytes,
    pack_rows,
    pair_rows,
    place_planes,
    plane_sizes,
)
from stoker_runtime.bench.reference import mixture as reference_mixture
from stoker_runtime.bench.reference import planes
from stoker_runtime.bench.reference.rotary import rotations
from stoker_runtime.bench.reference.rounding import Rounding
from stoker_runtime.bench.reference.weights import as_fp8_reads, as_read, parts_of, rows_of, values_of
from stoker_runtime.models.decoder_weights import MixtureWeights
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.rope_config import read_rope

FACTORS = {"short_factor": [1.0 + 0.3 * i for i in range(12)], "long_factor": [3.0 + 0.7 * i for i in range(12)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 1.7},
    "llama3": {"factor": 9.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, "original_max_position_embeddings": 91},
    "yarn": {"factor": 6.0, "original_max_position_embeddings": 90, "beta_fast": 9.0, "truncate": False},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 77, **FACTORS},
}


@pytest.mark.parametrize("longest", [70, 333])
@pytest.mark.parametrize("kind", SCALINGS)
def test_positions_turn_as_in_transformers(kind: str, longest: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 31000.0, "rope_type": kind, **SCALINGS[kind]}
    config = LlamaConfig(hidden_size=72, num_attention_heads=3, max_position_embeddings=123, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(longest)[None])
    expected = torch.cat((cos[0, :, :12], sin[0, :, :12]), dim=1)
    got = rotations(read_rope(config.to_dict(), 24), longest, longest, torch.device("cpu"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["rows", "fragments", "pairs"])
@pytest.mark.parametrize("ordered", [False, True])
def test_integers_are_codes_less_zero_times_scale(bits: int, layout: Any, ordered: bool) -> None:
    rows, columns, group = (37, 66, 22) if layout == "rows" else (128, 192, 32)
    torch.manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scale = torch.rand(columns // group, rows) * 0.1
    zero = torch.randint(0, 1 << bits, scale.shape, dtype=torch.uint8)
    order = torch.randperm(columns).int() if ordered else None
    stored = (codes, scale, zero)
    if layout == "pairs":
        stored = (pair_rows(codes), *(pair_rows(each.t()).t() for each in (scale, zero)))
    data = pack_rows(codes, bits) if layout == "rows" else to_fragments(stored[0], "int4" if bits == 4 else "int8")
    got = values_of(IntegerWeight(data, *stored[1:], bits, group, order, layout))
    spread = [each.repeat_interleave(group, 0).t() for each in (scale, zero.float())]
    x = torch.randn(3, columns, dtype=torch.float64)
    read = x if order is None else x[:, order.long()]
    torch.testing.assert_close(x @ got.double().t(), read @ ((codes.float() - spread[1]) * spread[0]).double().t())


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("layout", ["fragments", "pairs"])
def test_floats_of_four_bits_are_those_of_rows_in_any_layout(kind: Any, layout: Any) -> None:
    rows, columns, block = 64 * random.randrange(1, 4), 64 * random.randrange(1, 4), 16 if kind == "nvfp4" else 32
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(100, 150, (columns // block, rows), dtype=torch.uint8)
    factor = None
    if kind == "nvfp4":
        factor = torch.rand(rows)
        scale = torch.randint(0, 127, scale.shape, dtype=torch.uint8) | torch.randint(0, 2, scale.shape).byte() << 7
    plain = Fp4Weight(data, scale, factor, kind)
    place = Fp4Weight(data.clone(), scale.clone(), None if factor is None else factor.clone(), kind, layout)
    store_fp4(place, 0, data, scale, factor)
    for weight in (plain, place):
        assert torch.equal(values_of(weight), dequantize_fp4(plain, torch.float32))
        assert torch.equal(dequantize_fp4(weight, torch.float32), dequantize_fp4(plain, torch.float32))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_mean_what_their_publisher_says(name: str) -> None:
    width = BLOCK_FORMATS[name][0]
    raw = bytes(random.Random(name).randrange(60) for _ in range(5 * block_row_bytes(name, 3 * width)))
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(5, -1)
    got = values_of(BlockWeight((BlockRows(name, data), BlockRows(name, data[:2].contiguous())), 3 * width))
    torch.testing.assert_close(got, torch.cat([decode_blocks(data, name)] * 2)[[0, 1, 2, 3, 4, 0, 1]])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_planes_mean_what_their_blocks_do(name: str) -> None:
    columns = 512 if BLOCK_FORMATS[name][0] == 256 else 576
    data = torch.randint(0, 60, (5, block_row_bytes(name, columns)), dtype=torch.uint8)
    place = place_planes(name, 5, columns, torch.empty(sum(plane_sizes(name, 5, columns)), dtype=torch.uint8))
    store_planes(place, 0, data)
    torch.testing.assert_close(values_of(BlockWeight((place,), columns)), decode_blocks(data, name), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_fp8_is_its_numbers_times_their_scales(kind: Any) -> None:
    data = torch.randn(140, 300).to(torch.float8_e4m3fn)
    scale = torch.rand({"fp8_tensor": (1, 1), "fp8_channel": (140, 1), "fp8_block": (2, 3)}[kind])
    got = values_of(LinearWeight(data, scale, kind))
    for row, column in ((0, 0), (139, 299), (127, 128), (128, 127)):
        block = {"fp8_tensor": (0, 0), "fp8_channel": (row, 0), "fp8_block": (row // 128, column // 128)}[kind]
        assert got[row, column] == data[row, column].float() * scale[block]


class LargestLive(TorchDispatchMode):
    """The most bytes that the results of operations held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = function(*args, **(kwargs or {}))
        for each in given if isinstance(given, tuple | list) else (given,):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                place = storage.data_ptr()
                self._users[place] = self._users.get(place, 0) + 1
                self._sizes[place] = storage.nbytes()
                weakref.finalize(each, self._dropped, place)
        self.most = max(self.most, sum(self._sizes.values()))
        return given

    def _dropped(self, place: int) -> None:
        self._users[place] -= 1
        if self._users[place] == 0:
            del self._users[place], self._sizes[place]


@pytest.mark.parametrize("name", sorted(PLANE_KINDS))
def test_planes_are_decoded_in_pieces_of_bounded_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, at_once = random.randint(600, 900), 512, 8 * 512 + random.randrange(512)
    data = torch.randint(0, 60, (rows, block_row_bytes(name, columns)), dtype=torch.uint8)
    place = place_planes(name, rows, columns, torch.empty(sum(plane_sizes(name, rows, columns)), dtype=torch.uint8))
    store_planes(place, 0, data)
    monkeypatch.setattr(planes, "DECODED_AT_ONCE", at_once)
    weight = BlockWeight((place,), columns)
    with LargestLive() as live:
        values = values_of(weight)
    assert live.most - values.nbytes < 128 * at_once < values.nbytes
    assert torch.equal(values, decode_blocks(data, name))
    assert torch.equal(torch.cat(list(parts_of(weight, random.randint(1, rows)))), values)
    ids = torch.randint(0, rows, (9,))
    assert torch.equal(rows_of(weight, ids), values[ids])


def test_activations_lose_what_three_bits_of_mantissa_lose() -> None:
    x = torch.randn(7, 93) * torch.logspace(-6, 4, 7)[:, None]
    left = as_fp8_reads(x)
    largest = x.abs().amax(1, keepdim=True)
    assert ((left - x).abs() <= torch.maximum(x.abs() / 15, largest / 448 / 500)).all()
    assert torch.equal(as_fp8_reads(torch.zeros(2, 5)), torch.zeros(2, 5))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_four_bit_floats_are_their_bits(kind: Any) -> None:
    rows, columns, block = 5, 96, {"nvfp4": 16, "mxfp4": 32}[kind]
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(40, 70, (columns // block, rows), dtype=torch.uint8)
    factor = torch.rand(rows) if kind == "nvfp4" else None
    got = values_of(Fp4Weight(data, scale, factor, kind))
    spoken = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    for row, column in ((0, 0), (4, 95), (2, 33), (3, 16)):
        bits = scale[column // block, row]
        number = spoken[int(data[row, column // 2]) >> 4 * (column % 2) & 15]
        size = float(bits.view(torch.float8_e4m3fn)) if kind == "nvfp4" else 2.0 ** (int(bits) - 127)
        wanted = number * size * (1.0 if factor is None else float(factor[row]))
        assert float(got[row, column]) == pytest.approx(wanted)


def test_integers_of_eight_bits_multiply_as_their_op_does() -> None:
    x = torch.randn(6, 51)
    weight = Int8Weight(torch.randint(-127, 128, (9, 51), dtype=torch.int8), torch.rand(9, 1))
    expected = int8_linear(x, weight, bias=None, out=None)
    torch.testing.assert_close(as_read(x, weight) @ values_of(weight).t(), expected, atol=1e-3, rtol=1e-4)


def test_what_a_router_reads_and_says_is_rounded_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone may choose another expert: what it costs is known only where the router rounds, too."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    spec = MoeSpec(experts=4, top_k=2, ffn=32, layers=frozenset({0}))
    experts = ExpertWeights(torch.randn(4, 64, 16).bfloat16(), torch.randn(4, 16, 32).bfloat16())
    weights = MixtureWeights(LinearWeight(torch.randn(4, 16).bfloat16()), experts)
    x = torch.randn(9, 16)
    seen: list[torch.Tensor] = []
    chosen = reference_mixture._choose

    def watched(spec: MoeSpec, logits: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
        seen.append(logits)
        return chosen(spec, logits, correction)

    monkeypatch.setattr(reference_mixture, "_choose", watched)
    exact = reference_mixture.mixture(spec, weights, x, None)
    other = reference_mixture.mixture(spec, weights, x, None, Rounding(torch.bfloat16))
    router = weights.router.data.float()
    assert torch.equal(seen[0], x @ router.t())
    assert torch.equal(seen[1], (x.bfloat16().float() @ router.t()).bfloat16().float())
    assert not torch.equal(exact, other)
