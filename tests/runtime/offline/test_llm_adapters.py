"""Streams and beams of an adapter: the tokens that `LLM.generate` gives for it, which PEFT's models vouch for in
tests/runtime/adapters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker_runtime import LLM, LoRARequest, SamplingParams
from stoker_runtime.errors import RequestError
from stoker_runtime.sampling_params import BeamSearchParams


def write_adapter(folder: Path, seed: int) -> str:
    """A random adapter of the output projections of `shape:tiny`."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{side}.weight": torch.randn(
            size, generator=generator
        )
        for layer in range(2)
        for side, size in (("A", (3, 64)), ("B", (64, 3)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_streams_and_beams_of_adapters(tmp_path: Path) -> None:
    prompts = ["Hello", "".join(random.choices("abcdefgh", k=9)), "Hello"]
    one, two = (LoRARequest(name, at, write_adapter(tmp_path / name, at)) for at, name in ((1, "one"), (2, "two")))
    loras = [one, None, two]
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    search = BeamSearchParams(beam_width=1, max_tokens=7, ignore_eos=True)
    with LLM("shape:tiny", device="cpu", dtype="float32", enable_lora=True, max_loras=2, max_num_seqs=4) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, lora_request=loras)]
        plain = llm.generate(prompts, params)[0].outputs[0].token_ids
        assert len(set(map(tuple, (plain, outputs[0].token_ids, outputs[2].token_ids)))) == 3, (
            "each says something else"
        )
        for prompt, lora, output in zip(prompts, loras, outputs, strict=True):
            deltas = list(llm.generate_stream(prompt, params, lora_request=lora))
            assert "".join(delta.text for delta in deltas) == output.text
        beams = llm.beam_search(prompts, search, lora_request=loras)
        found = [each.sequences[0].tokens[len(prompt) :] for prompt, each in zip(prompts, beams, strict=True)]
        assert found == [list(output.token_ids) for output in outputs]
        with pytest.raises(RequestError, match="3 prompts and 1 adapters"):
            llm.beam_search(prompts, search, lora_request=[one])
        llm.engine.adapters.check()
