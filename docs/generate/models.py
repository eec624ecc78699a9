"""Every architecture that is served, and the models that have it.

Invariants: read from the tables that a server reads.
Knows nothing of what a row says.
"""

from __future__ import annotations

from docs.generate.markdown import code, heading, table

from stoker_runtime.models.architectures.table import ARCHITECTURES, MODELS
from stoker_runtime.models.encoders.table import ENCODERS, FAMILIES
from stoker_runtime.models.gguf import GGUF_ENCODERS, GGUF_ROWS

INTRODUCTION = """
What `architectures` of a model's config.json may say. Models are examples: whatever has the architecture is served,
whatever it is called, and a setting that is not understood is refused by name. GGUF names `general.architecture`.
Of BERT's own cross-encoders converters to GGUF leave a layer out, and such files are refused; of others' they do not.
"""


def page() -> str:
    """docs/reference/models.md."""
    ggufs: dict[str, list[str]] = {}
    for spoken, row in GGUF_ROWS.items():
        for name in (row.architecture, *row.variants):
            ggufs.setdefault(name, []).append(spoken)
    rows = [
        (code(name), MODELS.get(name, ""), ", ".join(map(code, ggufs.get(name, ())))) for name in sorted(ARCHITECTURES)
    ]
    for spoken, encoder in GGUF_ENCODERS.items():
        for family in (encoder.family, *encoder.kin):
            for kind in FAMILIES[family].kinds:
                ggufs.setdefault(f"{family}{kind}", []).append(spoken)
    encoders = [(code(name), ENCODERS[name], ", ".join(map(code, ggufs.get(name, ())))) for name in sorted(ENCODERS)]
    return (
        heading("Models", INTRODUCTION)
        + "\n## Decoders\n"
        + table(("architecture", "models", "GGUF"), rows)
        + "\n## Encoders\n"
        + table(("architecture", "models", "GGUF"), encoders)
    )
