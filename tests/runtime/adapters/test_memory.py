"""Slots on the device: their bytes, which are counted before they are allocated, and what comes from a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.executor.published_configs import PUBLISHED

from stoker_runtime.adapters import files
from stoker_runtime.adapters.files import read_adapter
from stoker_runtime.adapters.layout import AdapterLayout
from stoker_runtime.adapters.memory import AdapterMemory, adapter_bytes, slot_bytes
from stoker_runtime.adapters.step import AdapterStep
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.request import SamplingParams
from stoker_runtime.step.batch import SlotAssign

CPU = torch.device("cpu")
TINY = build_spec(read_source("shape:tiny"))
LAYOUT = AdapterLayout.of(TINY, embeddings=False)
BASE = "base_model.model.model.layers.1"


def make_config(**settings: Any) -> EngineConfig:
    asked = EngineConfig("shape:tiny", dtype="float32", enable_lora=True, max_loras=3, max_lora_rank=9)
    return resolve(replace(asked, **settings), TINY, "cpu")


def write(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> str:
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [r"1.self_attn.v_proj"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def good() -> dict[str, torch.Tensor]:
    name = f"{BASE}.self_attn.v_proj"
    return {f"{name}.lora_A.weight": torch.randn(4, 64), f"{name}.lora_B.weight": torch.randn(32, 4)}


@pytest.mark.parametrize("embeddings", [False, True])
def test_what_is_allocated_is_what_was_counted(embeddings: bool) -> None:
    config = make_config(lora_embeddings=embeddings, max_num_seqs=40, max_num_batched_tokens=700)
    memory = AdapterMemory(config, TINY, torch.float32, CPU)
    step = AdapterStep(config, memory, CPU)
    tensors = [each for each in (*vars(memory).values(), *vars(step).values()) if isinstance(each, torch.Tensor)]
    tensors += [each for plan in (step._token_plan, step._row_plan) for each in (plan.order, plan.adapters)]
    assert sum(each.nbytes for each in tensors) == pytest.approx(adapter_bytes(config, TINY), rel=1e-3)
    assert adapter_bytes(replace(config, enable_lora=False, lora_embeddings=False), TINY) == 0


def test_rows_that_take_turns_in_checkpoints_are_not_adapted() -> None:
    """Of Phi-3-small rows of gate and of up do; Q, K and V lie by KV heads, whose rows are brought apart."""
    config = {**PUBLISHED["Phi-3-small"], "num_hidden_layers": 1}
    spec = build_spec(ModelSource("m", SourceKind.SHAPE, None, config))
    layout = AdapterLayout.of(spec, embeddings=False)
    assert layout.modules == [
        f"model.layers.0.{each}" for each in ("self_attn.query_key_value", "self_attn.dense", "mlp.down_proj")
    ]


def test_a_slot_of_a_7b_model() -> None:
    spec = build_spec(read_source("shape:qwen2.5-7b"))
    config = resolve(EngineConfig("m", enable_lora=True), spec, "cuda")
    # Inputs and outputs of q, k, v (one A each), o, gate, up and down, of 28 layers, in rank 16 and two bytes.
    one_rank = 3 * 3584 + 4608 + 2 * 3584 + 2 * 3584 + 2 * 18944 + 18944 + 3584
    assert slot_bytes(config, spec) == 28 * one_rank * 16 * 2


def test_places_do_not_overlap_and_pieces_are_apart() -> None:
    layout = AdapterLayout.of(TINY, embeddings=True)
    taken = torch.zeros(layout.line, dtype=torch.int32)
    for place in layout.places:
        for piece in range(len(place.modules)):
            taken[place.a + piece * place.width :][: place.columns] += 1
        taken[place.b : place.b + sum(place.rows)] += 1
        assert place.a % 16 == place.b % 16 == place.width % 16 == 0
    assert int(taken.max()) == 1
    assert [place.name for place in layout.places][:2] == ["embed", "layers.0.qkv"]


def test_matrices_come_to_their_place_with_their_scale(tmp_path: Path) -> None:
    memory = AdapterMemory(make_config(), TINY, torch.float32, CPU)
    tensors = good()
    memory.keep(5, memory.read(write(tmp_path, tensors)))
    memory.load(5, 2)
    target = memory.targets["layers.1.qkv"]
    a, b = tensors.values()
    assert torch.equal(target.a[2, :4, 2], a)
    assert torch.equal(target.b[2, :4, 64 + 32 :], (b * 2.0).T)
    assert target.ranks.tolist() == [0, 0, 4]
    assert not target.a[2, :4, :2].any()
    assert memory.targets["layers.0.qkv"].ranks.tolist() == [0, 0, 0]
    memory.drop(5)
    with pytest.raises(KeyError):
        memory.load(5, 0)


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (lambda t: t.pop(f"{BASE}.self_attn.v_proj.lora_B.weight"), {}, "are missing"),
        (lambda t: t.update({f"{BASE}.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}), {}, "does not name"),
        (
            lambda t: t.update({f"{BASE}.mlp.upp_proj.lora_A.weight": torch.ones(4, 64)}),
            {},
            "nearest is model.layers.1",
        ),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}), {}, "--lora-embeddings"),
        (lambda t: t.update({f"{BASE}.self_attn.v_proj.lora_A.weight": torch.ones(4, 63)}), {}, r"takes \[4, 64\]"),
        (lambda t: t[f"{BASE}.self_attn.v_proj.lora_B.weight"].fill_(torch.nan), {}, "not finite"),
        (lambda t: t, {"lora_alpha": 1e39}, "times its scale 2.5e.38, is beyond"),
        (lambda t: t, {"r": 8}, r"takes \[8, 64\]"),
        (lambda t: t.clear(), {"target_modules": ["nothing"]}, "names no module"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    change: Any, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    tensors = good()
    change(tensors)
    memory = AdapterMemory(make_config(), TINY, torch.float32, CPU)
    with pytest.raises(ModelError, match=says):
        memory.read(write(tmp_path, tensors, **settings))


@pytest.mark.parametrize("size", [12, 100, 1 << 16])
def test_pieces_of_an_adapter_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Where memory is pinned, it is so piece by piece, and a slot gets all of them."""
    whole = read_adapter(write(tmp_path, good()), LAYOUT, max_rank=5, dtype=torch.float32)
    monkeypatch.setattr(files, "PINNED_BYTES", size)
    monkeypatch.setattr(files, "_pinned", torch.clone)
    cut = read_adapter(str(tmp_path), LAYOUT, max_rank=5, dtype=torch.float32, pinned=True)
    assert len(cut.pieces) == -(-whole.nbytes // size)
    assert all(piece.nbytes <= size for piece in cut.pieces)
    found, expected = (torch.full((cut.rank, LAYOUT.line), torch.nan) for _ in range(2))
    cut.copy_to(found)
    whole.copy_to(expected)
    assert torch.equal(found, expected)
    assert bool(found.any())
    assert cut.nbytes == whole.nbytes


def test_a_rank_beyond_the_room_names_the_flag(tmp_path: Path) -> None:
    memory = AdapterMemory(make_config(max_lora_rank=3), TINY, torch.float32, CPU)
    with pytest.raises(ModelError, match="raise --max-lora-rank"):
        memory.read(write(tmp_path, good()))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="convert it"):
        memory.read(str(tmp_path))


def test_rows_know_the_adapters_of_their_slots() -> None:
    config = make_config(max_num_seqs=4)
    step = AdapterStep(config, AdapterMemory(config, TINY, torch.float32, CPU), CPU)

    def assign(slot: int, adapter: int) -> SlotAssign:
        return SlotAssign(slot, SamplingParams(), 0, (), (), 1, adapter)

    assert step.assign([assign(1, 2)])
    assert not step.assign([assign(1, 2), assign(0, -1)])
    assert step.any([0, 1])
    assert not step.any([0, 2, 3])
    assert step.of_sequence(0, 5) is None
    inputs = step.of_sequence(1, 5)
    assert inputs is not None
    assert inputs.rows.adapters.tolist()[0] == 2
