"""What attention needs in one step of a model: the splits of decode rows and the tiles, planned once for all layers.

Invariants: nothing depends on values on the device, so a CUDA graph may capture it.
Knows nothing of steps, and of who owns pages.
"""

from __future__ import annotations

import torch

from stoker_kernels.attention import AttentionMeta, AttentionWorkspace, PrefixSpace, cut_prefix, plan_attention
from stoker_kernels.latent_attention import plan_latent_attention
from stoker_runtime.models.spec import ModelSpec


class AttentionPlanner:
    """The attention of one model over one page table."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        page_table: torch.Tensor,
        max_model_len: int,
        workspace: AttentionWorkspace,
        *,
        window: int | None = None,
    ) -> None:
        """`page_table [slots, pages]` int32; `workspace` of `attention_workspace`, for the widest step.

        `window`: the widest of the layers that it plans for; None: of all.
        """
        self._spec = spec
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._page_table = page_table
        self._max_model_len = max_model_len
        self._workspace = workspace
        # A window bounds the plan only if every layer has one.
        widest = 0 if 0 in spec.windows else max(spec.windows)
        self._widest_window = widest if window is None else window

    def plan(
        self,
        seq_slots: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        decodes: int,
        tokens: int,
        max_query_len: int,
        prefix: PrefixSpace | None = None,
        fresh: int = 1,
    ) -> AttentionMeta:
        """Of a step of `tokens` whose first `decodes` rows run one each; the shapes are those of `AttentionMeta`.

        `prefix`: of what all rows of a step of decodes begin with, which is attended apart from the rest. `fresh`: so
        many of a decode row's keys are of this step, at most.
        """
        spec = self._spec
        meta = AttentionMeta(
            page_table=self._page_table,
            seq_slots=seq_slots,
            query_start=query_start,
            seq_lens=seq_lens,
            num_decodes=decodes,
            max_query_len=max_query_len,
            max_seq_len=self._max_model_len,
            workspace=self._workspace,
            settled=True,  # the embedding stands between this step's description and its first layer
            fresh=fresh,
        )
        if spec.latent is not None:
            return plan_latent_attention(
                meta, heads=spec.heads, rank=spec.latent.kv_lora_rank, dtype=self._dtype, kv_dtype=self._kv_dtype
            )
        if prefix is not None:
            meta = cut_prefix(meta, prefix)
        return plan_attention(
            meta,
            num_tokens=tokens,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            kv_dtype=self._kv_dtype,
            window=self._widest_window,
            softcap=spec.attention_softcap,
            slopes=bool(spec.slopes),
            patterns=spec.sparse is not None,
        )
