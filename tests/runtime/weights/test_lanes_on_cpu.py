"""Checkpoints in integers and floats of few bits in an engine on a CPU, which packs them: the tokens of the numbers
that they stand for, and nothing decoded.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.runtime.weights import integer_forms, test_fp4_checkpoint
from tests.runtime.weights.both_ways import assert_likeliest, random_qwen3

from stoker_kernels.launch import cc
from stoker_kernels.quant import Fp4Weight, IntegerWeight
from stoker_runtime import LLM, SamplingParams

pytestmark = pytest.mark.skipif(cc.refusal("cpu_lanes_floats") is not None, reason=f"{cc.refusal('cpu_lanes_floats')}")
FORMS = (*integer_forms.FORMATS, *integer_forms.WIDE, *test_fp4_checkpoint.FORMATS)


@pytest.mark.matrix("form")
@pytest.mark.parametrize("form", FORMS)
def test_an_engine_packs_them_and_says_what_the_numbers_say(form: str, tmp_path: Path) -> None:
    shape = integer_forms.WIDE_SHAPE if form in integer_forms.WIDE else integer_forms.SHAPE
    (tmp_path / "dense").mkdir()
    dense = random_qwen3(tmp_path / "dense", shape, random.randrange(1 << 20))
    if form in test_fp4_checkpoint.FORMATS:
        quantized, plain = test_fp4_checkpoint.write(dense, tmp_path, *test_fp4_checkpoint.FORMATS[form])
    else:
        config, quantize = (integer_forms.FORMATS | integer_forms.WIDE)[form]
        quantized, plain = integer_forms.write(dense, tmp_path, config, quantize)
    llm = LLM(str(quantized), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, page_size=16)
    for layer in llm.engine.executor.decoder.weights.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(weight, IntegerWeight | Fp4Weight)
            small = isinstance(weight, IntegerWeight) and weight.group % 32 and weight.group < weight.in_features
            assert weight.layout == ("rows" if small else "lanes")
    prompts = [[random.randrange(shape["vocab_size"]) for _ in range(random.randint(3, 12))] for _ in range(3)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    tokens = llm.generate_tokens(prompts, params)
    assert_likeliest(plain, prompts, tokens)
