"""GGUF files: header, tensor types, row order of Llama's Q and K, and SmolLM2 token for token."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.weights.gguf_file import write_out

from stoker_runtime.checkpoint.gguf_header import TENSOR_TYPES, read_gguf_header
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights import copy_lanes
from stoker_runtime.weights.load import load_weights
from stoker_runtime.weights.routing import Vocabulary, tensor_names

CPU = torch.device("cpu")
Checkpoint = Callable[[str], Path]
Kind = gguf.GGMLQuantizationType
NAMES = {"llama": "llama", "llama-tied": "llama", "mistral-window": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
NAMES |= {name: name for name in ("gemma", "gemma2", "gemma3", "granite", "smollm3")}
KINDS = (Kind.Q4_0, Kind.Q8_0, Kind.Q5_1, Kind.Q4_1, Kind.Q5_0)
# Those whose converter orders the rows of Q and K for pairs of neighbours.
PERMUTED = ("llama", "granite", "smollm3")


def _permute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The row order that converters give Llama's Q and K, written out: row 2i is i, row 2i+1 is i + D/2."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return rows[order]


def write_gguf(
    checkpoint: Path, path: Path, architecture: str, kind: Kind = Kind.F32, *, rounded: bool = False
) -> Path:
    """A GGUF file of a tiny checkpoint; matrices of whole blocks as `kind`, or `rounded` to what those stand for; the
    rest as F32.
    """
    source = read_source(str(checkpoint))
    spec = build_spec(source)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(spec.num_layers)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_context_length(spec.max_position)
    writer.add_rope_freq_base(spec.rope.theta)
    if spec.windows[0]:
        writer.add_sliding_window(spec.windows[0])
    _add_own_keys(writer, spec, architecture)
    writer.add_eos_token_id(2)
    writer.add_token_list(["a", "b\xe4", "c"])
    if spec.rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(spec.rope.dim))
    tensors = load_file(checkpoint / "model.safetensors")
    for parameter in spec.parameters():
        theirs = tensor_names(spec, parameter.name, Vocabulary.HF)
        names = tensor_names(spec, parameter.name, Vocabulary.GGUF)
        for position, (hf, name) in enumerate(zip(theirs, names, strict=True)):
            data = tensors[hf].numpy()
            if parameter.role is Role.NORM:
                data = data + np.float32(spec.norm_offset)
            if architecture in PERMUTED and ".qkv" in parameter.name and position < 2:
                data = _permute(data, (spec.heads, spec.kv_heads)[position])
            whole = data.ndim == 2 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            encoded = kind if whole else Kind.F32
            if rounded:
                data, encoded = gguf.dequantize(gguf.quantize(data, encoded), encoded), Kind.F32
            writer.add_tensor(name, gguf.quantize(data, encoded), raw_dtype=encoded)
    write_out(writer)
    return path


def _add_own_keys(writer: gguf.GGUFWriter, spec: ModelSpec, architecture: str) -> None:
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logit_softcap:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)
    if architecture == "granite":
        writer.add_embedding_scale(spec.embedding_multiplier)
        writer.add_residual_scale(spec.residual_multiplier)
        writer.add_attention_scale(spec.attention_multiplier)
        writer.add_logit_scale(1 / spec.logit_scale)


def _llama3_divisors(dim: int) -> np.ndarray[Any, Any]:
    """What Llama 3.1's scaling of the test checkpoint divides each frequency by, as its converter stores it."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * 10000.0 ** (2 * pair / dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_gives_the_logits_of_its_checkpoint(
    name: str, tiny_checkpoint: Checkpoint, tmp_path: Path, paged_model: Any
) -> None:
    file = write_gguf(tiny_checkpoint(name), tmp_path / "m.gguf", NAMES[name])
    prompt = list(range(5, 60))
    ours = paged_model(str(file)).step([(0, prompt)], all_logits=True)[0]
    expected = paged_model(str(tiny_checkpoint(name))).step([(0, prompt)], all_logits=True)[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [*zip(NAMES, KINDS + KINDS, strict=True)])
def test_blocks_of_a_file_stand_for_their_numbers(
    name: str, kind: Kind, tiny_checkpoint: Checkpoint, tmp_path: Path, paged_model: Any
) -> None:
    """As they are decoded; and where they stay blocks, which are multiplied by activations of 16 bits or more."""
    both = [tmp_path / "blocks.gguf", tmp_path / "plain.gguf"]
    for file, rounded in zip(both, (False, True), strict=True):
        write_gguf(tiny_checkpoint(name), file, NAMES[name], kind, rounded=rounded)
    prompt = list(range(5, 60))
    expected = paged_model(str(both[1])).step([(0, prompt)], all_logits=True)[0]
    for method, limit in (("none", 1e-4), ("gguf", 3e-2)):
        got = paged_model(str(both[0]), quantization=method).step([(0, prompt)], all_logits=True)[0]
        torch.testing.assert_close(got, expected, atol=limit, rtol=limit)


def test_biases_of_a_llama_are_in_the_order_of_its_rows(
    tiny_checkpoint: Checkpoint, tmp_path: Path, paged_model: Any
) -> None:
    file = write_gguf(tiny_checkpoint("llama-bias"), tmp_path / "m.gguf", "llama", Kind.BF16)
    source = read_source(str(file))
    spec = build_spec(source)
    weights = load_weights(source, spec, CPU, torch.float32)
    raw = load_file(tiny_checkpoint("llama-bias") / "model.safetensors")
    expected = torch.cat([raw[f"model.layers.1.self_attn.{name}_proj.bias"] for name in "qkv"])
    bias = weights.layers[1].qkv_bias
    assert bias is not None
    assert torch.equal(bias, expected)


QUANTIZABLE = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
def test_a_quantized_file_is_near_its_checkpoint(
    kind: Kind, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_lanes, "CHUNK_BYTES", 20_000)
    checkpoint = tiny_checkpoint("llama")
    file = write_gguf(checkpoint, tmp_path / "m.gguf", "llama", kind)
    spec = build_spec(read_source(str(checkpoint)))
    exact = load_weights(str(checkpoint), spec, CPU, torch.float32)
    ours = load_weights(str(file), build_spec(read_source(str(file))), CPU, torch.float32)
    bound = {"F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01, "Q5_0": 0.06, "Q5_1": 0.06}.get(kind.name, 0.12)
    for mine, theirs in [
        (ours.layers[1].qkv.data, exact.layers[1].qkv.data),
        (ours.layers[2].gate_up.data, exact.layers[2].gate_up.data),
        (ours.embed, exact.embed),
    ]:
        assert 0.0 < (mine - theirs).norm() < bound * theirs.norm()


DECODABLE = sorted(set(gguf.quants._type_traits) | {Kind.F16, Kind.F32})


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_every_type_the_package_decodes_lands_in_its_rows(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of random bytes, of types the package may not be able to make: rows as it decodes the whole."""
    monkeypatch.setattr(copy_lanes, "CHUNK_BYTES", 40_000)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 64, 512
    rng = np.random.default_rng(int(kind))
    # Bytes below 0x3c keep 16-bit scales finite.
    raw = rng.integers(0, 0x3C, (rows, columns // block * block_bytes), dtype=np.uint8)
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_tensor("t", raw, raw_dtype=kind)
    write_out(writer)
    entry = read_gguf_header(file).tensors["t"]
    assert (entry.shape, entry.num_bytes, entry.encoding) == ((rows, columns), raw.size, kind.name)
    ours = torch.empty(rows, columns)
    from stoker_runtime.weights.gguf_decode import make_decoder

    with copy_lanes.CopyLanes(CPU) as lanes:
        lanes.join(lanes.submit_decoded(entry, ours, 1, make_decoder(entry, 0)))
    assert torch.equal(ours, torch.from_numpy(gguf.dequantize(raw, kind)))


def test_the_table_of_types_is_the_formats() -> None:
    for number, (name, block, block_bytes) in TENSOR_TYPES.items():
        assert Kind(number).name == name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (block, block_bytes)
    assert {Kind(number) for number in TENSOR_TYPES} == set(DECODABLE)


def test_metadata_values(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    header = read_gguf_header(write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", "llama"))
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "bä", "c"]
    assert header.metadata["llama.attention.head_count"] == 4


def typed(data: bytes, name: bytes, dimensions: int, kind: int) -> bytes:
    """The file with another type for a tensor, four bytes behind its name, their number and its dimensions."""
    place = data.index(name) + len(name) + 4 + 8 * dimensions
    return data[:place] + kind.to_bytes(4, "little") + data[place + 4 :]


def _damaged(tiny_checkpoint: Checkpoint, path: Path, change: Callable[[bytes], bytes]) -> Path:
    whole = write_gguf(tiny_checkpoint("llama"), path / "m.gguf", "llama")
    whole.write_bytes(change(whole.read_bytes()))
    return whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGML" + data[4:], "not a GGUF file: it starts with b'GGML'"),
        (lambda data: b"", "not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1 is not supported"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:300], "the file ends after 300 bytes; it is truncated"),
        # In the header a tensor's name is followed by its dimensions, then by its type.
        (lambda data: typed(data, b"output_norm.weight", 1, 37),
         "tensor output_norm.weight has type 37, which is not known; known are F32, F16, Q4_0, "),
        (lambda data: typed(data, b"blk.0.ffn_down.weight", 2, 14),
         r"tensor blk.0.ffn_down.weight has rows of \d+, no multiple of Q6_K's 256"),
        (lambda data: data[:-100], r"tensor \S+ ends at byte \d+, but the file has \d+ bytes; it is truncated"),
    ],
)
def test_a_damaged_file_is_reported(
    change: Callable[[bytes], bytes], message: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_source(str(_damaged(tiny_checkpoint, tmp_path, change)))


def test_an_unknown_architecture_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", "gemma3n")
    says = r"architecture 'gemma3n' is not supported\. The nearest is gemma3\. .* rows of .*gguf/table\.py"
    with pytest.raises(ModelError, match=says):
        read_source(str(file))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    write_out(writer)
    with pytest.raises(ModelError, match=r"lacks llama\.block_count"):
        read_source(str(tmp_path / "m.gguf"))
