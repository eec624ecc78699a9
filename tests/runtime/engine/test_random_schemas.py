"""Hundreds of random schemas through the engine: every output parses and validates, an independent library says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from tests.runtime.engine.schemas import SchemaWriter
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.sampling import grammar
from stoker_runtime.scheduler.sequence import Sequence

SCHEMAS = 500
MAX_TOKENS = 4000


def test_every_output_validates() -> None:
    writer = SchemaWriter(seed=1)
    executor = UniformExecutor(
        num_pages=1024,
        page_size=64,
        max_num_seqs=16,
        max_model_len=MAX_TOKENS + 8,
        max_num_batched_tokens=64,
        vocab_size=260,
        eos_token_ids=(257,),
    )
    loop = StepLoop(executor, EngineConfig(model="shape:tiny"))
    asked: dict[Sequence, dict[str, Any]] = {}
    for number in range(SCHEMAS):
        schema = writer.schema()
        # Few with white space: most of their tokens are just that.
        constraint = grammar.json_schema(schema, None if number % 8 == 0 else "")
        params = SamplingParams(max_tokens=MAX_TOKENS, constraint=constraint, seed=number)
        asked[loop.add(Request(f"r{number}", (1,), params))] = schema
    while loop.has_work:
        loop.step()
    for sequence, schema in asked.items():
        tokens = sequence.tokens[1:] if sequence.complete else sequence.tokens[1:-1]
        # Ids beyond the bytes are words of their number.
        text = b"".join(bytes([token]) if token < 256 else f" {token}".encode() for token in tokens.tolist()).decode()
        assert sequence.finish is FinishReason.STOP, (schema, sequence.finish, sequence.error, text[:500])
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{text!r} is no {json.dumps(schema)}: {error}") from error
    assert sum(len(sequence.tokens) for sequence in asked) > 20 * SCHEMAS, "the schemas are too simple"
