"""Checks attention with a shared prefix on a GPU, then times it beside plain attention and beside what bounds it.

`python -m stoker_kernels.attention.shared_prefix.bench` prints µs of one layer, over layers whose pages together do not
fit the L2: all rows begin with the same pages, and have keys of their own behind them. The limit is the larger of the
bytes of all pages, each read once, over the bandwidth, and of the operations over the rate of cuBLAS in bf16. `pays` is
what `prefix_pays` says of the row. The exit status is 1 where a result is wrong.
Knows nothing of the model around it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stoker_kernels.attention import (
    AttentionMeta,
    PrefixSizes,
    attention_workspace,
    cut_prefix,
    paged_attention,
    plan_attention,
    prefix_pays,
    prefix_space,
    share_workspace,
    shared_prefix_attention,
)
from stoker_kernels.attention.bench.measure import graph_time
from stoker_kernels.launch.pdl import enable_pdl

BANDWIDTH, OPERATIONS = 4.33e12, 772e12  # a second, of an H200: bytes of a read, operations of cuBLAS in bf16
L2_BYTES = 160e6  # pages of all layers: three times an H200's L2
PAGE = 64
TOLERANCE = 1e-2  # bf16 rounds the weights and the result to 2⁻⁹
# Query heads, KV heads, dimensions of a head.
MODELS = {"7B": (28, 4, 128), "0.6B": (16, 8, 128), "1B": (32, 8, 64)}
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
ROWS, SHARED, OWN = (2, 4, 16, 64, 256), (512, 2048, 8192), (320,)


@dataclass(frozen=True, slots=True)
class Row:
    """`rows` rows of `own` keys each behind `shared` ones: µs a layer, plain and shared, and what bounds them."""

    model: str
    cache: str
    rows: int
    shared: int
    own: int
    plain_us: float
    shared_us: float
    limit_us: float
    pays: bool


@dataclass(frozen=True, slots=True)
class Layers:
    """The same step over the caches `[layers]` of several layers, planned for both kernels."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    scales: Tensor | None
    plain: AttentionMeta
    shared: AttentionMeta

    def call(self, layer: int, *, shared: bool) -> Tensor:
        """Attention of one layer."""
        k, v = self.caches[layer]
        attend: Callable[..., Tensor] = shared_prefix_attention if shared else paged_attention
        meta = self.shared if shared else self.plain
        return attend(self.q, k, v, meta, scale=self.q.shape[2] ** -0.5, k_scale=self.scales, v_scale=self.scales)

    def run(self, layer: int, *, shared: bool) -> None:
        """`call`, whose result nobody reads."""
        self.call(layer, shared=shared)


def make(model: str, cache: str, rows: int, shared: int, own: int, layers: int) -> Layers:
    """Random layers; the rows' own keys differ by up to a page."""
    q_heads, kv_heads, dim = MODELS[model]
    common, each = shared // PAGE, own // PAGE + 1
    pages = common + rows * each
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    table = torch.cat((order[:common].expand(rows, -1), order[common:].view(rows, each)), 1).contiguous()
    lengths = shared + own - torch.arange(rows, device="cuda", dtype=torch.int32) % PAGE
    shape = (pages, kv_heads, PAGE, dim)
    k, v = ([torch.randn(shape, device="cuda").to(CACHES[cache]) for _ in range(layers)] for _ in range(2))
    workspace = attention_workspace(rows, q_heads, dim, "cuda")
    meta = AttentionMeta(
        table, torch.arange(rows, device="cuda", dtype=torch.int32),
        torch.arange(rows + 1, device="cuda", dtype=torch.int32), lengths, rows, 1, 32768, workspace, settled=True,
    )  # fmt: skip
    sizes = PrefixSizes(rows, table.shape[1], PAGE, q_heads, kv_heads, dim, CACHES[cache].itemsize)
    space = prefix_space(sizes, "cuda")
    space.keys.fill_(shared)
    plan = partial(
        plan_attention, num_tokens=rows, num_kv_heads=kv_heads, head_dim=dim, kv_dtype=CACHES[cache]
    )
    cut = plan(cut_prefix(replace(meta, workspace=share_workspace(workspace)), space))
    found = Layers(
        torch.randn(rows, q_heads, dim, device="cuda", dtype=torch.bfloat16),
        list(zip(k, v, strict=True)),
        torch.rand(kv_heads, device="cuda") + 0.5 if cache == "fp8" else None,
        plan(meta),
        cut,
    )
    torch.cuda.synchronize()  # a settled step's plan is complete
    return found


def measure(model: str, cache: str, rows: int, shared: int, own: int) -> tuple[Row, float]:
    """A row, and by how much the two results differ: the largest error over 1 + |plain|."""
    q_heads, kv_heads, dim = MODELS[model]
    token = kv_heads * dim * 2 * CACHES[cache].itemsize
    read = (shared + rows * own) * token
    layers = make(model, cache, rows, shared, own, max(2, int(L2_BYTES / read) + 1))
    want, got = (layers.call(0, shared=each).float() for each in (False, True))
    error = float(((got - want).abs() / (1 + want.abs())).max())
    times = [
        graph_time([partial(layers.run, layer, shared=each) for layer in range(len(layers.caches))])
        for each in (False, True)
    ]
    limit = max(read / BANDWIDTH, 4 * rows * q_heads * dim * (shared + own) / OPERATIONS)
    pays = prefix_pays(rows, shared, num_kv_heads=kv_heads, head_dim=dim, kv_bytes=CACHES[cache].itemsize)
    plain_us, shared_us, limit_us = (seconds * 1e6 for seconds in (*times, limit))
    return Row(model, cache, rows, shared, own, plain_us, shared_us, limit_us, pays), error


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser("python -m stoker_kernels.attention.shared_prefix.bench", description=__doc__)
    parser.add_argument("--models", default="7B", help=f"of {', '.join(MODELS)}, comma-separated")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shared", default=",".join(map(str, SHARED)), help="keys, whole pages of 64")
    parser.add_argument("--own", default=",".join(map(str, OWN)), help="keys of a row, at least 64")
    parser.add_argument("--json", type=Path, help="write all rows here")
    args = parser.parse_args()
    rows, shared, own = ([int(part) for part in given.split(",")] for given in (args.rows, args.shared, args.own))
    enable_pdl(True)
    found, wrong = [], 0
    for work in itertools.product(args.models.split(","), CACHES, rows, shared, own):
        row, error = measure(*work)
        wrong += not error < TOLERANCE
        said = "" if error < TOLERANCE else f"  WRONG: error {error:.3g}"
        print(
            f"{row.model:5} {row.cache:4} {row.rows:4} rows, {row.shared:6} + {row.own:5} keys: plain "
            f"{row.plain_us:8.1f} µs, shared {row.shared_us:8.1f} ({row.plain_us / row.shared_us:5.2f}x), limit "
            f"{row.limit_us:7.1f} ({row.limit_us / row.shared_us:4.0%}){' pays' if row.pays else ''}{said}",
            flush=True,
        )
        found.append(row)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in found]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
