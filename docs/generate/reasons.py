"""Every reason that the operator's code can give a condition, read from its source.

Invariants: what makes a condition is found by the names of its classes, `Condition`, `Finding`, `Trouble`,
`FetchFailure` and `Fit`, and of functions that only wrap `Condition`; a reason that a pod or an autoscaler words itself
is not found, for nobody here decides it.
Knows nothing of pages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

OPERATOR = Path(__file__).resolve().parents[2] / "operator" / "stoker_operator"
READY = "Ready"


class Maker(NamedTuple):
    """A call that gives a reason: of which condition ("" for the call's own first argument), and where it stands."""

    condition: str
    position: int


MAKERS: Mapping[str, Maker] = {
    "Condition": Maker("", 2),
    "Finding": Maker(READY, 0),
    "Trouble": Maker(READY, 0),
    "FetchFailure": Maker(READY, 0),
    "Fit": Maker("Fits", 0),
}
# `replace(fit, verdict="TooLarge")`
KEYWORDS = {"verdict": "Fits"}


class Reason(NamedTuple):
    """A reason of a condition, and the module that gives it, by its path in the operator."""

    condition: str
    reason: str
    module: str


def found() -> list[Reason]:
    """All of them, each once a module."""
    reasons: dict[Reason, None] = {}
    for module in sorted(OPERATOR.rglob("*.py")):
        name = module.relative_to(OPERATOR).as_posix()
        for condition, reason in _of_module(ast.parse(module.read_text(encoding="utf-8"))):
            reasons[Reason(condition, reason, name)] = None
    return sorted(reasons)


def _of_module(tree: ast.Module) -> Iterator[tuple[str, str]]:
    makers = {**MAKERS, **_wrappers(tree)}
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        words = _assigned(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                yield from _of_call(node, makers, words)


def _of_call(call: ast.Call, makers: Mapping[str, Maker], words: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    for keyword in call.keywords:
        if keyword.arg in KEYWORDS:
            yield from ((KEYWORDS[keyword.arg], reason) for reason in _strings(keyword.value, words))
    maker = makers.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if maker is None or len(call.args) <= maker.position:
        return
    first = call.args[0]
    condition = maker.condition or (first.value if isinstance(first, ast.Constant) else "")
    if condition:
        yield from ((str(condition), reason) for reason in _strings(call.args[maker.position], words))


def _wrappers(tree: ast.Module) -> dict[str, Maker]:
    """Functions that do nothing but `return Condition("Type", …, reason, …)` with a parameter as the reason."""
    wrappers = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not isinstance(node.body[-1], ast.Return):
            continue
        made, parameters = node.body[-1].value, [each.arg for each in node.args.args]
        if not (isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "Condition"):
            continue
        kind, reason = made.args[0], made.args[2]
        if isinstance(kind, ast.Constant) and isinstance(reason, ast.Name) and reason.id in parameters:
            wrappers[node.name] = Maker(str(kind.value), parameters.index(reason.id))
    return wrappers


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, set[str]]:
    """The texts that each name of a function may hold."""
    words: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            words.setdefault(node.targets[0].id, set()).update(_strings(node.value, {}))
    return words


def _strings(node: ast.expr, words: Mapping[str, set[str]]) -> set[str]:
    """The texts that an expression may be; of names only those that were assigned."""
    match node:
        case ast.Constant(value=str(text)) if text:
            return {text}
        case ast.IfExp():
            return _strings(node.body, words) | _strings(node.orelse, words)
        case ast.BoolOp():
            return set().union(*(_strings(value, words) for value in node.values))
        case ast.Name():
            return words.get(node.id, set())
    return set()
