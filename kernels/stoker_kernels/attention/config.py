"""Tile sizes and split rules of the attention kernels, by head dimension, cache type and SM.

Invariants: a configuration never changes which result is right, only its rounding and its speed; those chosen here fit
the shared memory of their SM. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.triton_tile import padded_dim

MANY_STREAMS = 4096
SHORT_CHUNK = 1
WIDE_TOKENS = 2048  # chunks of more tokens than this in a step are `sm90_prefill`'s


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`block_n` keys a step; `stages` is Triton's count, of which a page lookup in the loop takes about half.

    Splits: `programs_per_sm` resident programs share the keys of a step equally, in items of `min_split` (a multiple of
    block_n) to `max_split` keys, with room for `slack` times as many items as programs besides one per row.
    `cvt`: e4m3 is unpacked by the conversion instruction (SM 8.9 on), else by integer operations.
    """

    block_n: int = 64
    num_warps: int = 4
    stages: int = 7
    min_split: int = 128
    max_split: int = 1024
    programs_per_sm: int = 2
    slack: int = 2
    cvt: bool = False


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Decode by equal shares (`share_plan.py`): a ring of `stages` units of 64 keys in each resident CTA.

    No CTA gets fewer than `min_units` units of a stream that has as many. From `tail_from` units a CTA on, an eighth of
    a step of short streams is left to CTAs that are done early.
    """

    stages: int
    ctas_per_sm: int
    min_units: int
    tail_from: int = 8


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`block_m` rows of (token, head of the group) against `block_n` keys."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    stages: int = 5
    cvt: bool = False


def decode_config(head_dim: int, kv_bytes: int, sm: int, streams: int) -> DecodeConfig:
    """The configuration for `kv_bytes` a cached element and `streams` = rows · KV heads, a host bound of the step.

    Below SM 8.0 nothing is pipelined, so stages mean nothing. The thresholds are an H200's (LAB.md): few streams want
    few splits and deep pipelines, up to eight streams an SM many small programs, more of them large blocks.
    """
    row = padded_dim(head_dim) * kv_bytes
    if row > 256:
        return DecodeConfig(block_n=32 if row <= 512 else 16, stages=5, min_split=128)
    if sm == 90 and row == 256:
        if streams <= 64:
            return DecodeConfig(stages=7, min_split=256)
        if streams <= 1024:
            return DecodeConfig(block_n=32, num_warps=2, stages=5, programs_per_sm=4)
        return DecodeConfig(stages=5, programs_per_sm=3)
    if row <= 128:
        if sm == 90:
            return DecodeConfig(stages=5, programs_per_sm=5, cvt=kv_bytes == 1)
        return DecodeConfig(stages=7, programs_per_sm=4)
    return DecodeConfig(stages=7 if chip_of(sm).large_shared else 5)


def rare_decode_config(config: DecodeConfig, head_dim: int, kv_bytes: int, sm: int) -> DecodeConfig:
    """`config` with the one tile of a head dimension that launches that are not tuned share; its splits stay."""
    tile = decode_config(head_dim, kv_bytes, sm, streams=MANY_STREAMS)
    return replace(config, block_n=tile.block_n, num_warps=tile.num_warps, stages=tile.stages, cvt=tile.cvt)


def decode_configs(head_dim: int, kv_bytes: int, sm: int) -> list[DecodeConfig]:
    """Every configuration that `decode_config` gives for some number of streams."""
    return list(dict.fromkeys(decode_config(head_dim, kv_bytes, sm, streams) for streams in (1, 256, MANY_STREAMS)))


def prefers_wide_tiles(tokens: int) -> bool:
    """Whether `sm90_prefill` pays for a step of `tokens` prefill tokens: in padded steps, all below, it lost time."""
    return tokens > WIDE_TOKENS


def prefers_one_launch(kv_bytes: int, decodes: int, tokens: int) -> bool:
    """Whether `sm90_mixed` pays for a step of `decodes` decode rows and `tokens` prefill tokens.

    Of e4m3 its tiles are faster than any other kernel's; of bf16 they are not, but one launch is faster than two.
    """
    if kv_bytes == 1:
        return tokens > 0
    return decodes > 0 and tokens > 0 and not prefers_wide_tiles(tokens)


def stream_config(kv_bytes: int, group: int) -> StreamConfig:
    """The configuration for `kv_bytes` a cached element and `group` query heads a KV head, head dimension 128.

    192 KB of an SM's shared memory hold keys and values in flight. e4m3 is bound by what a CTA does to a unit: there
    three CTAs an SM are faster than two.
    """
    if kv_bytes == 2:
        return StreamConfig(stages=3, ctas_per_sm=2, min_units=4)
    return StreamConfig(stages=4 if group < 8 else 3, ctas_per_sm=3, min_units=4)


def mixed_stream_config(kv_bytes: int) -> StreamConfig:
    """The configuration of `sm90_mixed`: with e4m3 its CTAs hold a unit of f16 too, so that two are resident."""
    return StreamConfig(stages=3 if kv_bytes == 2 else 4, ctas_per_sm=2, min_units=4)


def shares_first(kv_bytes: int, ctas: int, tiles: int) -> int:
    """How many of `ctas` CTAs begin with a share of the decode rows, in a step of up to `tiles` tiles of chunks.

    Where the tiles are few they fill the gaps that shares leave; where they are many an SM has a CTA of each kind. With
    e4m3 shares wait for instructions, not for memory, and there is nothing to gain from tiles beside them.
    """
    if kv_bytes == 1:
        return 0
    return ctas if tiles <= ctas else ctas // 2


def prefill_config(head_dim: int, kv_bytes: int, sm: int, mean_tokens: int) -> PrefillConfig:
    """The configuration for `kv_bytes` a cached element and `mean_tokens` query tokens a row, from host bounds.

    Wide tiles pay for long chunks of a 16-bit cache alone: short ones are mostly diagonal.
    """
    dim = padded_dim(head_dim)
    if dim > 128 and (kv_bytes > 2 or sm < 80):  # SM 7.5 has 64 KB of shared memory, and fp32 takes twice as much
        return PrefillConfig(block_m=16, block_n=16, num_warps=4, stages=2)
    if sm == 90:
        if dim > 128 or kv_bytes > 2:
            return PrefillConfig(block_m=64, block_n=32, num_warps=4, stages=3)
        if kv_bytes == 1 or mean_tokens < 4096:
            return PrefillConfig(block_m=64, num_warps=4, cvt=kv_bytes == 1)
        return PrefillConfig()
    if dim > 128 or kv_bytes > 2:
        return PrefillConfig(block_m=64, block_n=16, num_warps=4, stages=2)
    return PrefillConfig(block_m=64, block_n=32, num_warps=4, stages=3)


def prefill_configs(head_dim: int, kv_bytes: int, sm: int) -> list[PrefillConfig]:
    """Every configuration that `prefill_config` gives for some chunk length."""
    return list(dict.fromkeys(prefill_config(head_dim, kv_bytes, sm, tokens) for tokens in (SHORT_CHUNK, 8192)))
