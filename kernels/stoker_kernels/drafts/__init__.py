"""Speculation on the device: drafts from a sequence's own tokens, or what a model that drafts is to run; the tokens to
verify them by; what is accepted.

`op.py` holds the public functions, `triton_match.py`, `triton_describe.py` and `triton_verify.py` the kernels,
`reference.py` the oracle.
Must never know: sampling parameters, models, and who decides how many drafts a row may have.
"""

from stoker_kernels.drafts.op import (
    HEADER,
    accept_drafts,
    describe_draft,
    expand_drafts,
    follow_drafts,
    match_drafts,
    record_tokens,
)
from stoker_kernels.drafts.types import Matching, VerifyOutputs

__all__ = [
    "HEADER",
    "Matching",
    "VerifyOutputs",
    "accept_drafts",
    "describe_draft",
    "expand_drafts",
    "follow_drafts",
    "match_drafts",
    "record_tokens",
]
