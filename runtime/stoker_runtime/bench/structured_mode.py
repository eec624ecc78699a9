"""`stoker bench engine --structured`: what a JSON schema costs, against free text of the same lengths.

Each N runs twice over: N requests under the schema, then N without it that generate as many tokens each, both sampled
at temperature 1 with fixed seeds. Cost = 1 - tok/s under the schema / tok/s without. Every output that came to its end
is parsed and validated before the row counts.
Invariants: the step loop measured is the one that serves; a round is warmed up by itself. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker_runtime.bench.rounds import random_prompts, run_together
from stoker_runtime.bench.table import print_line
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.sampling.grammar import json_schema
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.text.tokenizer import Tokenizer

TIMED_ROUNDS = 3
RECORD_TOKENS = 80
"""The most that one record takes where every character is a token of its own."""
KINDS = ("house", "garden", "street")
COLUMNS = ("N", "tokens", "free tok/s", "JSON tok/s", "cost", "valid", "cut")
WIDTHS = (6, 8, 11, 11, 8, 8, 6)

Schema = dict[str, Any]
Validate = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class StructuredRow:
    """One N: tokens a second without and with the schema, outputs that are valid, wrong, and cut by the length."""

    n: int
    tokens: int
    free_tok_s: float
    json_tok_s: float
    valid: int
    wrong: int
    cut: int

    @property
    def cost(self) -> float:
        """The share of the throughput that the schema takes."""
        return 1 - self.json_tok_s / self.free_tok_s


def records_schema(count: int) -> Schema:
    """A list of `count` records, each at most RECORD_TOKENS long."""
    record = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999},
            "name": {"type": "string", "pattern": "^[a-z]{1,12}$"},
            "kind": {"enum": list(KINDS)},
            "open": {"type": "boolean"},
        },
        "required": ["id", "name", "kind", "open"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": count, "maxItems": count}


def validate_records(value: Any, count: int) -> None:
    """Raise ValueError unless `value` is what `records_schema` says, found without any schema."""
    if not isinstance(value, list) or len(value) != count:
        raise ValueError("not so many records")
    for record in value:
        if list(record) != ["id", "name", "kind", "open"]:
            raise ValueError("other keys")
        good_id = type(record["id"]) is int and 0 <= record["id"] <= 999
        name = record["name"]
        good_name = isinstance(name, str) and name.isascii() and name.islower() and name.isalpha() and len(name) <= 12
        if not (good_id and good_name and record["kind"] in KINDS and isinstance(record["open"], bool)):
            raise ValueError("a value of another kind")


def choose_schema(path: Path | None, output_len: int) -> tuple[Schema, Validate]:
    """The schema to measure, and how its outputs are validated. Raises ConfigError for a file that is no schema."""
    if path is None:
        count = max(1, output_len // RECORD_TOKENS)
        return records_schema(count), lambda value: validate_records(value, count)
    try:
        import jsonschema
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--json-schema validates with jsonschema; install it: pip install jsonschema", param="json_schema"
        ) from error
    try:
        schema: Schema = json.loads(path.read_text(encoding="utf-8"))
        validator = jsonschema.Draft202012Validator(schema)
        validator.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        raise ConfigError(f"--json-schema {path}: {error}", param="json_schema") from error

    def check(value: Any) -> None:
        try:
            validator.validate(value)
        except jsonschema.ValidationError as error:
            raise ValueError(error.message) from error

    return schema, check


class StructuredBench:
    """Rounds of one executor under one schema."""

    def __init__(self, executor: Executor, input_len: int, output_len: int, schema: Schema, validate: Validate) -> None:
        self._loop = StepLoop(executor, executor.config)
        self._vocab = executor.vocab_size
        self._tokenizer = Tokenizer.load(executor.config.tokenizer or executor.config.model)
        self._input_len = input_len
        self._output_len = output_len
        self._constraint = json_schema(schema, "")
        self._validate = validate

    def measure(self, n: int) -> StructuredRow:
        """Warm up, time, validate, and return one row. Raises EngineError when a request fails."""
        under = [
            SamplingParams(max_tokens=self._output_len, constraint=self._constraint, seed=seed) for seed in range(n)
        ]
        self._round(under)
        walls, outputs = zip(*(self._round(under) for _ in range(TIMED_ROUNDS)), strict=True)
        last: list[Sequence] = outputs[-1]
        lengths = [len(each.tokens) - each.prompt_length for each in last]
        free = [SamplingParams(max_tokens=length, ignore_eos=True, seed=seed) for seed, length in enumerate(lengths)]
        self._round(free)
        free_wall = min(self._round(free)[0] for _ in range(TIMED_ROUNDS))
        tokens = sum(lengths)
        cut = [each for each in last if each.finish is FinishReason.LENGTH]
        wrong = sum(not self._is_valid(each) for each in last if each.finish is not FinishReason.LENGTH)
        return StructuredRow(n, tokens, tokens / free_wall, tokens / min(walls), n - len(cut) - wrong, wrong, len(cut))

    def _round(self, asked: list[SamplingParams]) -> tuple[float, list[Sequence]]:
        """Seconds from the submission of all requests to the end of the last, and their sequences."""
        prompts = random_prompts([self._input_len] * len(asked), self._vocab, seed=1)
        requests = (
            Request(str(at), prompt, params) for at, (prompt, params) in enumerate(zip(prompts, asked, strict=True))
        )
        wall, sequences, _ = run_together(self._loop, requests, (FinishReason.STOP, FinishReason.LENGTH))
        return wall, sequences

    def _is_valid(self, sequence: Sequence) -> bool:
        tokens = sequence.tokens[sequence.prompt_length :]
        try:
            self._validate(json.loads(self._tokenizer.decode(tokens if sequence.complete else tokens[:-1])))
        except ValueError:
            return False
        return True


def report(args: argparse.Namespace, executor: Executor) -> int:
    """Measure every N, print the table, write the file; 1 when an output was wrong."""
    schema, validate = choose_schema(args.json_schema, args.output_len)
    bench = StructuredBench(executor, args.input_len, args.output_len, schema, validate)
    rows: list[StructuredRow] = []
    print_line(COLUMNS, WIDTHS)
    for n in (int(part) for part in args.n.split(",")):
        row = bench.measure(n)
        rows.append(row)
        valid = f"{row.valid}/{n - row.cut}"
        cells = (n, row.tokens, f"{row.free_tok_s:,.0f}", f"{row.json_tok_s:,.0f}", f"{row.cost:.1%}", valid, row.cut)
        print_line(cells, WIDTHS)
        if args.json:
            described = {"engine": executor.describe(), "schema": schema}
            args.json.write_text(
                json.dumps({**described, "rows": [{**asdict(r), "cost": r.cost} for r in rows]}, indent=1)
            )
    return 1 if any(row.wrong for row in rows) else 0
