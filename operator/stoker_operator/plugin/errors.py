"""What a verb refuses, in one sentence for the person at the terminal.

Invariants: the message says what to do. Knows nothing of verbs.
"""

from __future__ import annotations


class PluginError(Exception):
    """A verb cannot go on; the message says why and what to do."""
