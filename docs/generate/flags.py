"""Flags, variables and keys of every command that has them.

Invariants: read from the tables that the commands themselves read.
Knows nothing of what a setting does beyond its line of help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from docs.generate.markdown import code, heading, table

from stoker_operator import settings as operator
from stoker_operator.activator import settings as activator
from stoker_operator.gateway import settings as gateway
from stoker_operator.node_cache import settings as node_cache
from stoker_runtime.settings import vllm_flags, vllm_ignored, vllm_refused
from stoker_runtime.settings.flag import Flag
from stoker_runtime.settings.flags import DEFAULTS, FLAGS, spell

INTRODUCTION = """
A setting of `stoker serve` has one name in three spellings: the flag `--max-model-len`, the variable
`STOKER_MAX_MODEL_LEN`, and the key `max-model-len` of the file that `--config` names. Flags win over variables,
variables over the file. A name that is not here is an error that says the nearest one.
"""
VLLM = """
## Flags of vLLM

A command line written for vLLM is taken as it is where it asks for what Stoker does. What only says how vLLM is to do
its work is checked as vLLM would check it, then ignored, and the log has a line that says so and what happens instead.
Everything else is refused: the server does not start, and says what there is instead. All of it holds for the `STOKER_`
variable and the key of a file, too.
"""
OPERATOR = """
## `stoker operator`

Flags, or the variable of the same name; the chart sets them from its values.
"""
ACTIVATOR = """
## `stoker activator`

As the operator's. What may be held for a service is said in its spec.
"""
NODE_CACHE = """
## `stoker node-cache`

As the operator's; the chart runs one on each node.
"""
GATEWAY = """
## `stoker gateway`

As the operator's. It tells an Envoy beside it which service answers for which model.
"""
Row = tuple[str, str, str, str]
Settings = operator.Settings | activator.ActivatorSettings | gateway.GatewaySettings | node_cache.NodeCacheSettings


def page() -> str:
    """docs/reference/flags.md."""
    parts = [heading("Flags and variables", INTRODUCTION), "\n## `stoker serve`\n"]
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        rows = [_serve_row(flag) for flag in FLAGS if flag.group == group]
        parts.append(f"\n### {group}\n" + table(("flag", "variable", "default", "what it does"), rows))
    parts.append(VLLM + table(("flag", "what it does", "values", "why, or what instead"), _vllm_rows()))
    columns = ("flag", "variable", "default", "what it does")
    parts.append(OPERATOR + table(columns, _rows(operator.Settings, operator.HELP)))
    parts.append(ACTIVATOR + table(columns, _rows(activator.ActivatorSettings, activator.HELP)))
    parts.append(NODE_CACHE + table(columns, _rows(node_cache.NodeCacheSettings, node_cache.HELP)))
    parts.append(GATEWAY + table(columns, _rows(gateway.GatewaySettings, gateway.HELP)))
    return "".join(parts)


def _serve_row(flag: Flag) -> tuple[str, str, str, str]:
    spelled = f"--[no-]{flag.name}" if flag.is_switch else f"--{flag.name} {flag.shown}"
    names = [spelled, *(f"--{alias}" for alias in (*flag.aliases, *flag.opposites))]
    default = DEFAULTS.get(flag.field)
    shown = "" if default in (None, "", ()) else code(spell(default))
    repeated = "; may be repeated" if flag.many and "repeat" not in flag.help and "several" not in flag.help else ""
    return ", ".join(map(code, names)), code(flag.variable), shown, flag.help + repeated


def _vllm_rows() -> list[Row]:
    """Every flag of vLLM's, what it comes to, the values that it may have, and why or what there is instead."""
    by_name = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases, *flag.opposites)}
    rows = [(code(f"--{name}"), "acts", *_acting(name, by_name[name])) for name in vllm_flags.ACTS]
    rows += [(code(f"--{name}"), "is so", "on", why) for name, why in vllm_flags.ALWAYS.items()]
    rows += [
        (code(f"--{name}"), "is so", ", ".join(code(value) or "empty" for value in allowed), why)
        for name, (allowed, why) in vllm_flags.ONE_VALUE.items()
    ]
    rows += [
        (code(f"--{name}"), "ignored", each.values.words if each.values else "on, off", each.instead)
        for name, each in vllm_ignored.IGNORED.items()
    ]
    rows += [(code(f"--{name}"), "refused", "", why) for name, why in vllm_refused.UNSUPPORTED.items()]
    return sorted(rows)


def _acting(name: str, flag: Flag) -> tuple[str, str]:
    values = "on, off" if flag.is_switch else code(flag.shown)
    if name == flag.name:
        return values, "as above"
    return values, f"is {code('--' + ('no-' if name in flag.opposites else '') + flag.name)}"


def _rows(settings: type[Settings], words: Mapping[str, str]) -> list[Row]:
    return [
        (
            code("--" + item.name.replace("_", "-")),
            code("STOKER_" + item.name.upper()),
            "" if item.default in ("", ()) else code(str(item.default)),
            words[item.name],
        )
        for item in fields(settings)
    ]
