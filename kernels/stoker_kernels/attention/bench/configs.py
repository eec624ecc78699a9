"""The configurations of the sweep, and how a table names them.

Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_kernels.attention.config import DecodeConfig, PrefillConfig, StreamConfig


@dataclass(frozen=True, slots=True)
class TileKernel:
    """csrc/sm90_prefill: it has nothing to choose."""


Config = DecodeConfig | StreamConfig | PrefillConfig | TileKernel

STREAM_BF16 = StreamConfig(3, 2, 4)
NO_TAIL = 10**6
FEW_BF16 = DecodeConfig(64, 4, 7, 256, 1024, 2)
DECODE_BF16: tuple[Config, ...] = (
    FEW_BF16,
    DecodeConfig(32, 2, 5, 128, 1024, 4),
    DecodeConfig(64, 4, 5, 128, 1024, 3),
    STREAM_BF16,
    StreamConfig(3, 2, 4, NO_TAIL),
    StreamConfig(2, 3, 4),
)
DECODE_FP8: tuple[Config, ...] = (
    DecodeConfig(64, 4, 5, 128, 1024, 5),
    DecodeConfig(64, 4, 5, 128, 1024, 5, cvt=True),
    StreamConfig(6, 2, 4),
    StreamConfig(4, 3, 4),
    StreamConfig(4, 3, 4, NO_TAIL),
)
PREFILL_BF16: tuple[Config, ...] = (PrefillConfig(128, 64, 8, 5), PrefillConfig(64, 64, 4, 5), TileKernel())
PREFILL_FP8: tuple[Config, ...] = (
    PrefillConfig(64, 64, 4, 5),
    PrefillConfig(64, 64, 4, 5, cvt=True),
    PrefillConfig(128, 128, 8, 5, cvt=True),
)


def label(config: Config) -> str:
    """`64n4w7s/128m2p` for decode in Triton, `3s2c4u` for decode by shares, `128x64n8w5s` for prefill.

    A trailing c: e4m3 goes by the conversion instruction; a trailing -: shares without a tail.
    """
    if isinstance(config, TileKernel):
        return "sm90"
    if isinstance(config, StreamConfig):
        return f"{config.stages}s{config.ctas_per_sm}c{config.min_units}u{'' if config.tail_from < NO_TAIL else '-'}"
    unpack = "c" if config.cvt else ""
    if isinstance(config, DecodeConfig):
        return (
            f"{config.block_n}n{config.num_warps}w{config.stages}s/{config.min_split}m{config.programs_per_sm}p{unpack}"
        )
    return f"{config.block_m}x{config.block_n}n{config.num_warps}w{config.stages}s{unpack}"
