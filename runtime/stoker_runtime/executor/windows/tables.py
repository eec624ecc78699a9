"""The page tables of layers with a window that give up pages, and what a step's attention needs of them.

A page table a part (`layout.py`): where the step's keys and values go differs from table to table, and so do the
pages that attention reads; all the rest of a step's description is one. What falls out of sight is left in a table as
it was, and never read (`kvcache/sight.py`). Layers with a window have a plan of attention of their own, which begins
where they see.

Invariants: allocated once; reads and writes nothing that depends on values on the device, so that a CUDA graph may
capture it.
Knows nothing of who owns pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from stoker_kernels.attention import AttentionMeta, AttentionWorkspace, share_workspace
from stoker_kernels.ragged import RaggedOutputs, RaggedRows, SlotTensors, prepare_ragged
from stoker_kernels.slots import prepare_decode
from stoker_runtime.executor.windows.layout import KvLayout
from stoker_runtime.models.attention_plan import AttentionPlanner
from stoker_runtime.models.inputs import PagesOfLayer
from stoker_runtime.models.spec import ModelSpec


class NearTables:
    """Those of one model. `table_of` is the number of each layer's table, 0 for what sees everything."""

    def __init__(
        self,
        layout: KvLayout,
        spec: ModelSpec,
        dtypes: tuple[torch.dtype, torch.dtype],
        tables: torch.Tensor,
        max_tokens: int,
        max_model_len: int,
        workspace: AttentionWorkspace,
    ) -> None:
        """`tables [parts, slots, pages]` int32; `dtypes` of the model and of its cache; `workspace` of all layers."""
        assert layout.sight is not None, "no layer gives up pages"
        self._tables = tables
        # Each begins at 16 bytes, as kernels that were compiled ahead expect.
        self._mapping = torch.zeros((len(tables), max_tokens + max_tokens % 2), dtype=torch.int64, device=tables.device)
        self._table_of: Sequence[int] = [table for table, _ in layout.places]
        # The plan of the layers that see everything is in use until the last of them has run.
        own = share_workspace(workspace)
        window = layout.sight.window
        self._planner = AttentionPlanner(spec, *dtypes, tables[0], max_model_len, own, window=window)

    @contextmanager
    def few_layers(self, layers: Sequence[int]) -> Iterator[None]:
        """Serve these layers alone, in this order."""
        table_of = self._table_of
        self._table_of = [table_of[layer] for layer in layers]
        try:
            yield
        finally:
            self._table_of = table_of

    def of_decode(
        self, row_slots: torch.Tensor, slots: SlotTensors, page_size: int, out: RaggedOutputs, meta: AttentionMeta
    ) -> tuple[PagesOfLayer, ...]:
        """Of a step that `prepare_decode` has described in `out`, and whose attention is `meta`: pages by layer."""
        for table, mapping in zip(self._tables, self._mapping, strict=True):
            prepare_decode(
                row_slots, slots.last_token, slots.position, table, page_size,
                ids_out=out.ids, positions_out=out.positions, seq_lens_out=out.seq_lens,
                slot_mapping_out=mapping[: len(out.ids)],
            )  # fmt: skip
        return self._by_layer(out, meta)

    def of_mixed(
        self, rows: RaggedRows, slots: SlotTensors, page_size: int, out: RaggedOutputs, meta: AttentionMeta
    ) -> tuple[PagesOfLayer, ...]:
        """The same of a step that `prepare_ragged` has described."""
        for table, mapping in zip(self._tables, self._mapping, strict=True):
            mine = replace(out, slot_mapping=mapping[: len(out.ids)])
            prepare_ragged(rows, replace(slots, page_table=table), page_size, meta.num_decodes, mine)
        return self._by_layer(out, meta)

    def _by_layer(self, out: RaggedOutputs, meta: AttentionMeta) -> tuple[PagesOfLayer, ...]:
        tokens = len(out.ids)
        planned = self._planner.plan(
            meta.seq_slots, meta.query_start, out.seq_lens,
            decodes=meta.num_decodes, tokens=tokens, max_query_len=meta.max_query_len,
        )  # fmt: skip
        near = (
            PagesOfLayer(mapping[:tokens], replace(planned, page_table=table))
            for table, mapping in zip(self._tables, self._mapping, strict=True)
        )
        pages = (PagesOfLayer(out.slot_mapping, meta), *near)
        return tuple(pages[table] for table in self._table_of)
