"""What the clients are told of the servers."""

from __future__ import annotations

MODEL, KEY = "smollm2", "sk-conformance"
