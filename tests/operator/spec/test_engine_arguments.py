"""engine_arguments.py against the engine's own parser: the same names out of the same words, however they are spelled.

`STOKER_UPDATE_GOLDEN=1` writes engine_table.py anew from the engine's table, and then, in another run, what the chart's
admission policy knows of it.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker_operator.spec import engine_arguments, engine_table
from stoker_operator.spec.engine_arguments import VARIABLES, VLLM_VARIABLES, is_unknown_variable, read
from stoker_operator.spec.engine_guard import FLAG_PATTERN, PROTECTED, VARIABLE_PATTERN
from stoker_operator.spec.service import SpecError, parse
from stoker_runtime.errors import ConfigError
from stoker_runtime.settings import parse as engine
from stoker_runtime.settings import vllm_flags, vllm_refused
from stoker_runtime.settings.flags import ALIASES, FLAGS, OPPOSITES

TABLE = Path(engine_table.__file__)
POLICY = Path(__file__).resolve().parents[3] / "charts" / "stoker" / "files" / "engine-flags.yaml"
CRD = Path(__file__).resolve().parents[3] / "crds" / "stoker.dev_inferenceservices.yaml"


def quoted(entries: Iterable[str]) -> list[str]:
    return [f'"{entry}"' for entry in sorted(entries)]


def pairs(entries: Mapping[str, str]) -> list[str]:
    return [f'"{key}": "{value}"' for key, value in sorted(entries.items())]


def engines_table() -> str:
    """engine_table.py as the engine's own tables have it."""
    names, texts, prefixes = "frozenset[str] = frozenset({|})", "dict[str, str] = {|}", "tuple[str, ...] = (|)"
    parts = [
        ("SETTINGS", names, quoted(flag.name for flag in FLAGS)),
        ("SWITCHES", names, quoted(flag.name for flag in FLAGS if flag.is_switch)),
        ("WORDS", names, quoted(flag.name for flag in FLAGS if flag.words)),
        ("ALIASES", texts, pairs(ALIASES)),
        ("OPPOSITES", texts, pairs(OPPOSITES)),
        ("OTHER_VARIABLES", prefixes, quoted(engine.OTHER_VARIABLES)),
        ("VLLM_UNSUPPORTED", names, quoted(vllm_refused.UNSUPPORTED)),
        ("VLLM_SWITCHES", names, quoted(vllm_flags.SWITCHES)),
        ("VLLM_ONE_WORD", names, quoted(vllm_flags.ONE_VALUE)),
        ("VLLM_WORD", names, quoted(vllm_flags.WORD)),
        ("VLLM_WORDS", names, quoted(vllm_flags.WORDS)),
    ]
    head = TABLE.read_text().partition('\n"""\n')[0] + '\n"""\n\nfrom __future__ import annotations\n\n'
    blocks = []
    for name, kind, entries in parts:
        opening, closing = kind.split("|")
        # vLLM's many flags share lines.
        lines = textwrap.wrap(", ".join(entries), 114, break_on_hyphens=False) if name[:4] == "VLLM" else entries
        listed = "".join(f"    {line.removesuffix(',')},\n" for line in lines)
        blocks.append(f"{name}: {opening}\n{listed}{closing}\n")
    return head + "\n".join(blocks)


def test_the_table_is_the_engines() -> None:
    wanted = engines_table()
    if os.environ.get("STOKER_UPDATE_GOLDEN"):
        TABLE.write_text(wanted)
    assert TABLE.read_text() == wanted, "STOKER_UPDATE_GOLDEN=1 pytest tests/operator/spec/test_engine_arguments.py"


def policys_names() -> str:
    """charts/stoker/files/engine-flags.yaml: the names by which the chart's admission policy goes."""
    listed = {*engine_table.SETTINGS, *ALIASES, *OPPOSITES, *engine_table.VLLM_UNSUPPORTED, *engine_table.VLLM_SWITCHES}
    listed |= {*engine_table.VLLM_ONE_WORD, *engine_table.VLLM_WORD, *engine_table.VLLM_WORDS}
    every = sorted(listed | {f"no-{name}" for name in listed})
    found = {name: engine_arguments._find(f"--{name}")[0] for name in every}
    unsupported = [name for name in every if found[name] in engine_table.VLLM_UNSUPPORTED]
    names = {
        "flags": [name for name in every if found[name] and name not in unsupported],
        "unsupported": unsupported,
        "takeAnyWord": [name for name in every if found[name] in engine_table.VLLM_ONE_WORD],
        "variables": sorted({*VARIABLES, *VLLM_VARIABLES}),
        "otherVariables": sorted(engine_table.OTHER_VARIABLES),
    }
    head = "# Written by tests/operator/spec/test_engine_arguments.py from the engine's own table.\n"
    # Quoted: to Helm's YAML a bare n is no text, but false.
    return head + str(yaml.safe_dump(names, sort_keys=False, default_flow_style=False, default_style='"'))


def test_the_charts_policy_has_the_same_names() -> None:
    wanted = policys_names()
    if os.environ.get("STOKER_UPDATE_GOLDEN"):
        POLICY.write_text(wanted)
    assert POLICY.read_text() == wanted, "STOKER_UPDATE_GOLDEN=1 pytest tests/operator/spec/test_engine_arguments.py"


def refused_by_the_engine(arguments: list[str]) -> str | None:
    """The setting at fault, or None where the engine takes them all."""
    try:
        engine._from_arguments(arguments, {})
    except ConfigError as error:
        return error.param
    return None


KNOWN = [flag.name for flag in FLAGS] + [*ALIASES, *OPPOSITES, *vllm_flags.SWITCHES, *vllm_flags.ONE_VALUE]
WORDS = st.sampled_from(["0", "1", "auto", "x", "-", "-x", "-port", "true", "/a b", "--", "fp8", "=", "é"])


@st.composite
def spelled(draw: st.DrawFn) -> list[str]:
    """A flag as a person or a script might spell it, with words that may or may not be its own."""
    name = draw(st.sampled_from([*KNOWN, *vllm_flags.WORD, *vllm_flags.WORDS, "no-such-flag", "prot"]))
    name = "".join(draw(st.sampled_from("-_")) if letter == "-" else letter for letter in name)
    name = draw(st.sampled_from(["", "", "no-", "no_"])) + name
    dashes = draw(st.sampled_from(["-", "--", "--", "---", "-_"])).replace("_", "-")
    words = draw(st.lists(WORDS, max_size=3))
    if words and draw(st.booleans()):
        return [f"{dashes}{name}={words[0]}", *words[1:]]
    return [f"{dashes}{name}", *words]


@settings(deadline=None)
@given(st.lists(spelled(), max_size=4).map(lambda parts: [word for part in parts for word in part]))
@example(["--max_model_len", "9"])
@example(["-port", "9"])
@example(["---port=9"])
@example(["--seed", "-port", "9"])
@example(["--pipeline-parallel-size", "--port", "9"])
@example(["--no-enable_prefix_caching", "--port=1\n"])
def test_the_same_settings_come_out_of_the_same_words(arguments: list[str]) -> None:
    """Value by value it is the engine's affair: each value here is replaced by one that its setting takes."""
    ours = [each for each in read(arguments) if each.ours]
    spoken, convert = [], engine._convert
    engine._convert = lambda flag, said, value: spoken.append(flag.name) or value  # type: ignore[assignment,func-returns-value]
    try:
        found = engine._from_arguments(arguments, {})
    except ConfigError:
        found = None
    finally:
        engine._convert = convert
    if found is None:
        return  # the engine does not start at all
    assert [each for each in ours if not each.name] == [], "the engine takes what is read as unknown"
    assert {each.name for each in ours} == found.keys()


@pytest.mark.parametrize("name", sorted(PROTECTED))
@settings(deadline=None)
@given(data=st.data())
def test_no_spelling_of_what_is_the_operators_passes(name: str, data: st.DataObject) -> None:
    """Every spelling that the engine takes for it, at any place among others, by the CRD and by the operator."""
    names = [name, *(alias for alias, of in ALIASES.items() if of == name)]
    names += [f"no-{name}"] if name in engine_table.SWITCHES else []
    chosen = "".join(data.draw(st.sampled_from("-_")) if c == "-" else c for c in data.draw(st.sampled_from(names)))
    flag = data.draw(st.sampled_from(["-", "--", "---"])) + chosen
    value = data.draw(st.sampled_from(["0", "x\ny", "", "--x"]))
    own = [f"{flag}={value}"] if data.draw(st.booleans()) else [flag, value]
    before = data.draw(st.sampled_from([[], ["--seed", "3"], ["--enforce-eager"], ["--disable-log-stats"]]))
    arguments = [*before, *own, "--seed", "4"]
    assert any(re.search(FLAG_PATTERN, each) for each in arguments), arguments
    with pytest.raises(SpecError, match=re.escape(f"spec.runtime.args[{len(before)}]")):
        parse(manifest(args=arguments))


def manifest(**runtime: Any) -> dict[str, Any]:
    spec = {"model": {"uri": "hf://a/b"}, "resources": {"gpus": 0}, "runtime": runtime}
    head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "demo"}}
    return head | {"spec": spec}


@pytest.mark.parametrize("name", sorted(PROTECTED))
def test_no_variable_of_what_is_the_operators_passes(name: str) -> None:
    variable = engine_arguments.variable(name)
    assert VARIABLES[variable] == name
    if name != "api-key":  # a Secret may bring keys by their variable
        assert re.search(VARIABLE_PATTERN, variable)
    with pytest.raises(SpecError, match=variable):
        parse(manifest(env=[{"name": variable, "value": "1"}]))


@pytest.mark.parametrize(
    ("runtime", "says"),
    [
        ({"args": ["--max-num-batched-token", "9"]}, "did you mean --max-num-batched-tokens?"),
        ({"args": ["--seed", "3", "4"]}, r"spec.runtime.args\[2\]: '4' is not allowed: it belongs to no flag"),
        ({"args": ["--headless"]}, "is not supported by the engine"),
        ({"env": [{"name": "STOKER_SEEED", "value": "1"}]}, "did you mean STOKER_SEED?"),
    ],
)
def test_a_typo_is_named_before_a_pod_is_made(runtime: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says.replace("?", r"\?")):
        parse(manifest(**runtime))
    if "3" not in runtime.get("args", ()):
        assert parse(manifest(**runtime, image="registry/newer:2")), "another engine may know it"


def test_what_the_engine_leaves_alone_is_left_alone() -> None:
    assert not is_unknown_variable("STOKER_KERNELS_X")
    assert not is_unknown_variable("OTHER_SEED")
    assert parse(manifest(env=[{"name": "STOKER_AOT_DIR", "value": "/x"}]))


def test_the_crd_refuses_by_the_same_patterns() -> None:
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(rule["rule"] for rule in node.get("x-kubernetes-validations", ()))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(yaml.safe_load(CRD.read_text()))
    assert f"!self.matches('{FLAG_PATTERN}')" in found
    assert f"!self.matches('{VARIABLE_PATTERN}')" in found
