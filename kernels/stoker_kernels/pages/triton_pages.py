"""Page copies in Triton: a program a block of a row of a page.

Invariants: offsets are 64 bits wide, for an arena has more words than 32 bits count; nothing is read back to the host.
It starts when all before it in the stream is over, other streams' events included: no programmatic launch.
Knows nothing of why pages are copied.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import I32, I32_ANYWHERE, I32_DIVISIBLE, I64, register_aot
from stoker_kernels.launch.triton_kernel import kernel

_BLOCK = 1024


@kernel(do_not_specialize=["source_page", "source_row", "target_page", "target_row"])
def _copy_pages_kernel(
    source,
    target,
    pairs,
    words,
    source_page,
    source_row,
    target_page,
    target_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(2)
    # Strides count rows of `words` words, so that they are 32 bits wide and offsets multiples of `words`.
    origin = tl.load(pairs + 2 * pair).to(tl.int64) * source_page + row * source_row
    destination = tl.load(pairs + 2 * pair + 1).to(tl.int64) * target_page + row * target_row
    inside = at < words
    values = tl.load(source + origin * words + at, mask=inside)
    tl.store(target + destination * words + at, values, mask=inside)


def copy_pages(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """`pages.copy_pages` on CUDA. No pairs launch nothing."""
    count = pairs.shape[0]
    if count == 0:
        return
    _, rows, words = source.shape
    strides = [stride for pages in (source, target) for stride in pages.stride()[:2]]
    assert not any(stride % words for stride in strides), "rows are apart by other than rows"
    _copy_pages_kernel[(rows, triton.cdiv(words, _BLOCK), count)](
        source,
        target,
        pairs,
        words,
        *(stride // words for stride in strides),
        BLOCK=_BLOCK,
    )


for _word, _words in itertools.product((I64, "u8"), (I32_DIVISIBLE, I32)):
    register_aot(
        _copy_pages_kernel,
        {"source": f"*{_word}", "target": f"*{_word}", "pairs": I32_ANYWHERE, "words": _words}
        | dict.fromkeys(("source_page", "source_row", "target_page", "target_row"), I32),
        [{"BLOCK": _BLOCK}],
        compact=_words == I32_DIVISIBLE and _word == I64,
    )
