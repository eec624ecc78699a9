"""Flags of adapters as vLLM spells them, and what is refused by name."""

from __future__ import annotations

import json
import random

import pytest

from stoker_runtime.config import LoraModule
from stoker_runtime.errors import ConfigError
from stoker_runtime.settings.parse import parse


def test_adapters_are_named_by_pairs_or_by_objects_and_the_model_may_follow() -> None:
    given = json.dumps({"name": "law", "path": "/a/law=2", "base_model_name": "base"})
    said = f"--enable-lora --lora-modules sql=/a/b=c/sql {given.replace(' ', '')} fr=rel/fr --max-loras 5"
    engine = parse([*said.split(), "--max-lora-rank=37", "--max-cpu-loras", "9", "m"], {}).engine
    assert engine.model == "m"
    assert engine.lora_modules == (
        LoraModule("sql", "/a/b=c/sql", ""), LoraModule("law", "/a/law=2", "base"), LoraModule("fr", "rel/fr", ""),
    )  # fmt: skip
    assert (engine.max_loras, engine.max_lora_rank, engine.max_cpu_loras, engine.host_loras) == (5, 37, 9, 9)
    assert parse(["m", "--enable-lora", "--max-loras", "6"], {}).engine.host_loras == 6
    assert not parse(["m"], {}).engine.enable_lora


def test_every_rank_that_adapters_have_can_be_asked_for() -> None:
    for rank in (1, random.randint(2, 255), 256):
        assert parse(["m", "--enable-lora", "--max-lora-rank", str(rank)], {}).engine.max_lora_rank == rank


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--lora-modules a=/a", "lora_modules needs enable_lora"),
        ("--max-cpu-loras 3", "max_cpu_loras needs enable_lora"),
        ("--enable-lora --max-lora-rank 257", "max_lora_rank is 257; it must be from 1 to 256"),
        ("--enable-lora --max-loras 65", "max_loras is 65; it must be from 1 to 64"),
        ("--enable-lora --max-loras 7 --max-cpu-loras 6", "max_cpu_loras is 6; it must be at least max_loras"),
        ("--enable-lora --lora-modules a=/a b=/b a=/c", "lora_modules names 'a' twice"),
        ("--enable-lora --lora-modules a=", "--lora-modules.*NAME=PATH"),
        ("--enable-lora --lora-modules =/a", "--lora-modules.*NAME=PATH"),
        ('--enable-lora --lora-modules {"name":"a","folder":"/a"}', "--lora-modules.*NAME=PATH"),
        ("--enable-lora --runner pooling", "not of those that pool"),
        ("--enable-lora --lora-module a=/a", "lora-modules"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(["m", *flags.split()], {})
