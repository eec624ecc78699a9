"""The fields of an InferenceService, from its CRD.

Invariants: every field of the schema is listed, also those that this version refuses by name.
Knows nothing of what the operator does with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from docs.generate.markdown import code, heading, table

CRD = Path(__file__).resolve().parents[2] / "crds" / "stoker.dev_inferenceservices.yaml"
INTRODUCTION = """
`stoker.dev/v1alpha1`, kind `InferenceService`, short name `infsvc`. Defaults are set by the API server. A rule that is
not met refuses the object when it is applied, with the rule's own words; `stoker up` checks the same rules.
"""
Schema = dict[str, Any]


def page() -> str:
    """docs/reference/inferenceservice.md."""
    version = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    spec = list(_walk("", properties["spec"]))
    fields = [
        (code(path), _type(field), "yes" if required else "", _default(field), field.get("description", ""))
        for path, field, required in spec
        if not _refused(field)
    ]
    refused = [(code(path), _rules(field)[0]) for path, field, _ in spec if _refused(field)]
    rules = [(code(path or "spec"), rule) for path, field, _ in [("", properties["spec"], True), *spec]
             if not _refused(field) for rule in _rules(field)]  # fmt: skip
    status = [
        (code(path), _type(field), field.get("description", "")) for path, field, _ in _walk("", properties["status"])
    ]
    columns = [
        (column["name"], code(column["jsonPath"]), "yes" if column.get("priority") else "")
        for column in version.get("additionalPrinterColumns", ())
    ]
    return "".join(
        (
            heading("InferenceService", INTRODUCTION),
            "\n## spec\n" + table(("field", "type", "required", "default", "what it does"), fields),
            "\n## Rules\n" + table(("field", "rule"), rules),
            "\n## Refused by this version\n" + table(("field", "why"), refused),
            "\n## status\n" + table(("field", "type", "what it says"), status),
            "\n## Columns of `kubectl get`\n" + table(("column", "value", "only with -o wide"), columns),
        )
    )


def _walk(prefix: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Every field below `schema`: its path, its schema, whether its object cannot do without."""
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, field, name in schema.get("required", ())
        if field.get("type") == "array":
            yield from _walk(f"{path}[]", field.get("items", {}))
        else:
            yield from _walk(path, field)


def _refused(field: Schema) -> bool:
    return any(rule["rule"] == "false" for rule in field.get("x-kubernetes-validations", ()))


def _rules(field: Schema) -> list[str]:
    return [str(rule.get("message", rule["rule"])) for rule in field.get("x-kubernetes-validations", ())]


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in field:
        return ", ".join(code(str(value)) for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    if "additionalProperties" in field and isinstance(field["additionalProperties"], dict):
        return f"map of {_type(field['additionalProperties'])}"
    limits = [
        f"{sign} {field[name]}" for name, sign in (("minimum", "≥"), ("maximum", "≤")) if name in field
    ]
    return " ".join([str(field.get("type", "any")), *limits])


def _default(field: Schema) -> str:
    default = field.get("default")
    if default is None or isinstance(default, (dict, list)):
        return ""
    return code(str(default).lower() if isinstance(default, bool) else str(default))
