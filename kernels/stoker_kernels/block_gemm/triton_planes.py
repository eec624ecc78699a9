"""Products with GGUF's blocks in planes, in Triton: one body for every format, for few tokens and for many; and rows.

For few tokens codes stay integers: with a mask and a magic number a code c becomes 128 + c exactly, the products of
a place's columns are summed in fp32, and each sum is scaled once; what 128, the offset and what is taken off bring is
the sum of x times a factor, found by a product with ones. So no weight is rounded at all. For many tokens a weight is
made first, in fp32 as its format defines it, rounded once to the dtype of x.
Invariants: sums go over the steps in order, and over the splits of K in theirs; `arrivals` are zero between launches.
Does not know: which products take which path, nor when K is split (`plane_launch`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.pdl import pdl_settle, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel

BASE = tl.constexpr(128)  # what codes of both 16-bit types stand on
STEP = tl.constexpr(256)
# The levels of IQ4, four bytes a word.
LEVELS_0, LEVELS_1 = tl.constexpr(-1079142271), tl.constexpr(-152379953)
LEVELS_2, LEVELS_3 = tl.constexpr(639175937), tl.constexpr(1901675829)


@triton.jit
def _moved(bits, FROM: tl.constexpr, TO: tl.constexpr, COUNT: tl.constexpr):
    """COUNT bits from position FROM, at position TO, of elements of 16 bits; all others 0."""
    if FROM >= TO:
        found = bits >> (FROM - TO)
    else:
        found = bits << (TO - FROM)
    return found & (((1 << COUNT) - 1) << TO)


@triton.constexpr_function
def _shift(operand, start, end):
    """PTX that moves pairs of 16 bits from position `start` to `end`, in `t`."""
    return f"shr.b32 t, {operand}, {start - end};" if start >= end else f"shl.b32 t, {operand}, {end - start};"


@triton.constexpr_function
def _pair(start, count, high_start, high_count, up, magic):
    """PTX of `_on_base` for two codes in a register: shifts, and one `lop3` for the mask and what is put beside.

    What a shift brings from the other half falls outside of the mask.
    """
    ones = (1 << count) - 1 << up
    text = f"{{ .reg .b32 t; {_shift('$1', start, up)} lop3.b32 $0, t, {ones * 0x10001}, {magic * 0x10001}, 0xea;"
    if high_count:
        ones = (1 << high_count) - 1 << up + count
        text += f" {_shift('$2', high_start, up + count)} lop3.b32 $0, t, {ones * 0x10001}, $0, 0xea;"
    return text + " }"


@triton.jit
def _on_base(words, high, AT: tl.constexpr, COUNT: tl.constexpr, HIGH_AT: tl.constexpr, HIGH: tl.constexpr,
             DTYPE: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """COUNT bits of `words` from AT on, and above them HIGH of `high` → 128 + code, in DTYPE."""
    UP: tl.constexpr = 0 if tl.bfloat16 == DTYPE else 3  # where the mantissa of 128 has its ones
    MAGIC: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x5800
    if WIDEN:  # the interpreter knows no asm
        bits = _moved(words, AT, UP, COUNT)
        if HIGH > 0:
            bits = bits | _moved(high, HIGH_AT, UP + COUNT, HIGH)
        found = (bits | MAGIC).to(DTYPE, bitcast=True).to(tl.float32)
    elif HIGH > 0:
        found = tl.inline_asm_elementwise(
            _pair(AT, COUNT, HIGH_AT, HIGH, UP, MAGIC), "=&r,r,r", [words, high], dtype=tl.int16, is_pure=True, pack=2
        ).to(DTYPE, bitcast=True)
    else:
        found = tl.inline_asm_elementwise(
            _pair(AT, COUNT, 0, 0, UP, MAGIC), "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
        ).to(DTYPE, bitcast=True)
    return found


@triton.jit
def _levels(codes):
    """Codes of four bits, int16 → levels in fp32."""
    code = codes.to(tl.int32)
    word = tl.where(code < 8, tl.where(code < 4, LEVELS_0, LEVELS_1), tl.where(code < 12, LEVELS_2, LEVELS_3))
    return ((word >> ((code & 3) * 8)) << 24 >> 24).to(tl.float32)


@triton.jit
def _number(word, PLACE: tl.constexpr):
    """The fp16 number of a word of four, in fp32."""
    return ((word >> (16 * PLACE)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, PLACE: tl.constexpr, SIGNED: tl.constexpr):
    """A byte of a word of eight, in fp32."""
    found = ((word >> (8 * PLACE)) & 0xFF).to(tl.int32)
    if SIGNED:
        found = found << 24 >> 24
    return found.to(tl.float32)


@triton.jit
def _scales(s0, s1, s2, s3, factor, PLACE: tl.constexpr, PLACES: tl.constexpr, BYTES: tl.constexpr,
            MINS: tl.constexpr, NIBBLES: tl.constexpr):  # fmt: skip
    """The scale of a place [ROWS], and what is taken off (BYTES) or added, exact in fp32."""
    if BYTES:
        word = s0 if PLACE < 8 else s1
        d = (factor & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        dmin = ((factor >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        if NIBBLES:
            both = ((word >> (8 * (PLACE % 8))) & 0xFF).to(tl.int32)
            scale = d * (both & 15).to(tl.float32)
            low = dmin * (both >> 4).to(tl.float32)
        else:
            scale = d * _byte(word, PLACE % 8, not MINS)
            low = dmin * _byte(s1, PLACE % 8, False) if MINS else d
    else:
        scale = _number(s0 if PLACE < 4 else s1, PLACE % 4)
        low = scale
        if MINS and PLACES == 8:
            low = _number(s2 if PLACE < 4 else s3, PLACE % 4)
        elif MINS:
            low = _number(s1, PLACE % 4)
    return scale, low


@triton.jit
def _place(words, high, scale, low, LOW: tl.constexpr, HIGH: tl.constexpr, LOW_AT: tl.constexpr, HIGH_AT: tl.constexpr,
           LEVELS: tl.constexpr, OFFSET: tl.constexpr, BYTES: tl.constexpr, MINS: tl.constexpr, DTYPE: tl.constexpr,
           WIDEN: tl.constexpr):  # fmt: skip
    """The weights of a place, as their format defines them: fp32 [ROWS, WORDS]."""
    if LEVELS:
        value = _levels(_moved(words, LOW_AT, 0, LOW))
    else:
        value = _on_base(words, high, LOW_AT, LOW, HIGH_AT, HIGH if HIGH < 4 else 0, DTYPE, WIDEN).to(tl.float32)
        if HIGH == 4:
            value += 16.0 * _on_base(high, high, HIGH_AT, HIGH, 0, 0, DTYPE, WIDEN).to(tl.float32) - 16.0 * BASE
        value -= 1.0 * BASE + OFFSET
    value = value * scale[:, None]
    if MINS and BYTES:
        value = value - low[:, None]
    elif MINS:
        value = value + low[:, None]
    return value


@triton.jit
def _header(scale, factor, n, row, step, SCALE_WORDS: tl.constexpr, BYTES: tl.constexpr):
    """The words of a step's scales, for rows: those that a format lacks are the first one again."""
    base = scale + step.to(tl.int64) * SCALE_WORDS * n + row
    s0 = tl.load(base)
    s1 = tl.load(base + n) if SCALE_WORDS > 1 else s0
    s2 = tl.load(base + 2 * n) if SCALE_WORDS > 2 else s0
    s3 = tl.load(base + 3 * n) if SCALE_WORDS > 2 else s0
    f = tl.load(factor + step.to(tl.int64) * n + row) if BYTES else 0
    return s0, s1, s2, s3, f


@triton.jit
def _span(
    acc, low, high, x, s0, s1, s2, s3, factor, there, left,
    WORDS: tl.constexpr, PLACES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LOW_EACH: tl.constexpr,
    HIGH_EACH: tl.constexpr, OFFSET: tl.constexpr, BYTES: tl.constexpr, MINS: tl.constexpr, NIBBLES: tl.constexpr,
    LEVELS: tl.constexpr, MANY: tl.constexpr, WIDEN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, TOKENS] and the products of a step or of a tail. `low`, `high` [ROWS, 1] and `x` [1, TOKENS] point to
    its first element of each row; `left` are its columns where CUT says that they may be fewer than its places have.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if WIDEN else DTYPE
    word = tl.arange(0, WORDS)
    ones = tl.full([acc.shape[0], WORDS], 1.0, WIDE)
    above = 0
    for place in tl.static_range(PLACES):
        if place % LOW_EACH == 0:
            words = tl.load(low + (place // LOW_EACH * WORDS + word)[None, :])
        if HIGH > 0 and place % HIGH_EACH == 0:
            above = tl.load(high + (place // HIGH_EACH * WORDS + word)[None, :]).to(tl.int16)
        mask = there[None, :] & (place * WORDS + word < left)[:, None] if CUT else there[None, :]
        b = tl.load(x + (place * WORDS + word)[:, None], mask=mask, other=0.0).to(WIDE)
        scale, low_ = _scales(s0, s1, s2, s3, factor, place, PLACES, BYTES, MINS, NIBBLES)
        if MANY:
            a = _place(
                words, above, scale, low_, LOW, HIGH, LOW * (place % LOW_EACH), HIGH * (place % HIGH_EACH), LEVELS,
                OFFSET, BYTES, MINS, DTYPE, WIDEN,
            )  # fmt: skip
            acc = tl.dot(a.to(DTYPE).to(WIDE), b, acc, input_precision="ieee")
        elif LEVELS:
            a = _levels(_moved(words, LOW * (place % LOW_EACH), 0, LOW)).to(WIDE)
            acc += scale[:, None] * tl.dot(a, b, input_precision="ieee")
        else:
            at = _on_base(
                words, above, LOW * (place % LOW_EACH), LOW, HIGH * (place % HIGH_EACH), HIGH if HIGH < 4 else 0, DTYPE,
                WIDEN,
            )  # fmt: skip
            part = tl.dot(at, b, input_precision="ieee")
            total = tl.dot(ones, b, input_precision="ieee")
            base = scale * (-BASE - OFFSET)
            if HIGH == 4:
                upper = _on_base(above, above, HIGH * (place % HIGH_EACH), HIGH, 0, 0, DTYPE, WIDEN)
                part += 16.0 * tl.dot(upper, b, input_precision="ieee")
                base = scale * (-17 * BASE - OFFSET)
            if MINS and BYTES:
                base = base - low_
            elif MINS:
                base = base + low_
            # One by one, so that each becomes a fused multiply and add.
            acc = acc + scale[:, None] * part
            acc = acc + base[:, None] * total
    return acc


@kernel
def plane_linear_kernel(
    x, low, high, scale, factor, bias, out, partial, arrivals, m, n, k, low_stride, high_stride, x_stride, out_stride,
    biased, splits,
    WORDS: tl.constexpr, PLACES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LOW_EACH: tl.constexpr,
    HIGH_EACH: tl.constexpr, OFFSET: tl.constexpr, BYTES: tl.constexpr, MINS: tl.constexpr, NIBBLES: tl.constexpr,
    LEVELS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    MANY: tl.constexpr, WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    held = tl.minimum(row, n - 1)  # rows beyond the last are the last once more, and are not written
    there = token < m
    steps = k // STEP
    each = tl.cdiv(steps, splits)
    first = split * each
    last = tl.minimum(first + each, steps)
    low_row = low + (held.to(tl.int64) * low_stride)[:, None]
    high_row = high + (held.to(tl.int64) * high_stride)[:, None] if HIGH > 0 else low_row
    x_row = x + (token.to(tl.int64) * x_stride)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if first < last:
        # Scales are asked for a step ahead: no ring holds them.
        s0, s1, s2, s3, f = _header(scale, factor, n, held, first, SCALE_WORDS, BYTES)
        for step in range(first, last):
            n0, n1, n2, n3, nf = _header(scale, factor, n, held, tl.minimum(step + 1, last - 1), SCALE_WORDS, BYTES)
            acc = _span(
                acc, low_row + step * (STEP * LOW // 16), high_row + step * (WORDS * (PLACES // HIGH_EACH)),
                x_row + step * STEP, s0, s1, s2, s3, f, there, STEP, WORDS, PLACES, LOW, HIGH, LOW_EACH, HIGH_EACH,
                OFFSET, BYTES, MINS, NIBBLES, LEVELS, MANY, WIDEN, False,
            )  # fmt: skip
            s0, s1, s2, s3, f = n0, n1, n2, n3, nf
    if not BYTES and split == splits - 1:
        low_tail = low_row + steps * (STEP * LOW // 16)
        high_tail = high_row + steps * (WORDS * (PLACES // HIGH_EACH))
        TAIL_WORDS: tl.constexpr = SCALE_WORDS // 2
        for tail in range(tl.cdiv(k - steps * STEP, 64)):
            base = scale + (steps.to(tl.int64) * SCALE_WORDS + tail * TAIL_WORDS) * n + held
            t0 = tl.load(base)
            t1 = tl.load(base + n) if MINS else t0
            acc = _span(
                acc, low_tail + tail * 16, high_tail + tail * 16, x_row + steps * STEP + tail * 64,
                t0, t1, t0, t0, 0, there, k - steps * STEP - tail * 64, 16, 4, LOW, HIGH, 4, 4,
                OFFSET, BYTES, MINS, NIBBLES, LEVELS, MANY, WIDEN, True,
            )  # fmt: skip
    if splits > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        inner = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        own = partial + tile.to(tl.int64) * (ROWS * TOKENS) + inner
        apart = tiles.to(tl.int64) * (ROWS * TOKENS)
        tl.store(own + split * apart, acc)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived != splits - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for other in range(splits):
            acc += tl.load(own + other * apart, cache_modifier=".cg")
    if biased:
        acc += tl.load(bias + held).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * out_stride + row[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=there[None, :] & (row < n)[:, None])


@kernel
def plane_rows_kernel(
    ids, low, high, scale, factor, out, count, first, n, k, low_stride, high_stride,
    WORDS: tl.constexpr, PLACES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LOW_EACH: tl.constexpr,
    HIGH_EACH: tl.constexpr, OFFSET: tl.constexpr, BYTES: tl.constexpr, MINS: tl.constexpr, NIBBLES: tl.constexpr,
    LEVELS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    # Rows `ids`, or those from `first` on, a step or a tail of each. An embedding is the first of a step's layers.
    pdl_settle(LAUNCH_PDL)
    place_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = place_row < count
    row = tl.load(ids + place_row, mask=there, other=0).to(tl.int32) if ids is not None else first + place_row
    row = tl.where(there, row, 0)
    steps = k // STEP
    part = tl.program_id(1)
    low_row = low + (row.to(tl.int64) * low_stride)[:, None]
    high_row = high + (row.to(tl.int64) * high_stride)[:, None] if HIGH > 0 else low_row
    target = out + place_row[:, None].to(tl.int64) * k
    if part < steps:
        s0, s1, s2, s3, f = _header(scale, factor, n, row, part, SCALE_WORDS, BYTES)
        _write(
            target + part * STEP, low_row + part * (STEP * LOW // 16),
            high_row + part * (WORDS * (PLACES // HIGH_EACH)), s0, s1, s2, s3, f, there, STEP,
            WORDS, PLACES, LOW, HIGH, LOW_EACH, HIGH_EACH, OFFSET, BYTES, MINS, NIBBLES, LEVELS, WIDEN,
        )  # fmt: skip
    elif not BYTES:
        tail = part - steps
        TAIL_WORDS: tl.constexpr = SCALE_WORDS // 2
        base = scale + (steps.to(tl.int64) * SCALE_WORDS + tail * TAIL_WORDS) * n + row
        t0 = tl.load(base)
        t1 = tl.load(base + n) if MINS else t0
        _write(
            target + steps * STEP + tail * 64, low_row + steps * (STEP * LOW // 16) + tail * 16,
            high_row + steps * (WORDS * (PLACES // HIGH_EACH)) + tail * 16,
            t0, t1, t0, t0, 0, there, k - steps * STEP - tail * 64, 16, 4, LOW, HIGH, 4, 4,
            OFFSET, BYTES, MINS, NIBBLES, LEVELS, WIDEN,
        )  # fmt: skip


@triton.jit
def _write(
    target, low, high, s0, s1, s2, s3, factor, there, left,
    WORDS: tl.constexpr, PLACES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LOW_EACH: tl.constexpr,
    HIGH_EACH: tl.constexpr, OFFSET: tl.constexpr, BYTES: tl.constexpr, MINS: tl.constexpr, NIBBLES: tl.constexpr,
    LEVELS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, WORDS)
    above = 0
    for place in tl.static_range(PLACES):
        if place % LOW_EACH == 0:
            words = tl.load(low + (place // LOW_EACH * WORDS + word)[None, :])
        if HIGH > 0 and place % HIGH_EACH == 0:
            above = tl.load(high + (place // HIGH_EACH * WORDS + word)[None, :]).to(tl.int16)
        scale, low_ = _scales(s0, s1, s2, s3, factor, place, PLACES, BYTES, MINS, NIBBLES)
        value = _place(
            words, above, scale, low_, LOW, HIGH, LOW * (place % LOW_EACH), HIGH * (place % HIGH_EACH), LEVELS, OFFSET,
            BYTES, MINS, target.dtype.element_ty, WIDEN,
        )  # fmt: skip
        column = place * WORDS + word
        tl.store(
            target + column[None, :], value.to(target.dtype.element_ty),
            mask=there[:, None] & (column < left)[None, :],
        )  # fmt: skip
