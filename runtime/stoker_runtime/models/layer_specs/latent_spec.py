"""Multi-head latent attention by numbers: what a layer narrows queries and keys to, and what a head is made of.

Invariants: plain data without torch; the names are those of published configurations. A token's cache is one latent
of `kv_lora_rank` values and one rotated key of `qk_rope_head_dim`, which all heads share.
Knows nothing of how any of it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """`q_lora_rank` 0: queries are not narrowed. `eps` is that of the norms of what was narrowed, which published
    models do not take from `rms_norm_eps`.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """A query or key of a head: the part that does not rotate, then the part that does."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached(self) -> int:
        """Values that a token has in the cache of a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def queries(self, heads: int) -> int:
        """What the layer's first projection makes for queries: their narrow form, or all heads."""
        return self.q_lora_rank or heads * self.qk_head_dim

    def working(self, heads: int) -> int:
        """Values that a token takes while a layer attends: what was projected, queries as they are and brought to
        latents, keys and values widened, and what came of both.
        """
        widened = heads * (self.qk_nope_head_dim + self.v_head_dim)
        absorbed = heads * self.kv_lora_rank
        narrow = self.q_lora_rank and heads * self.qk_head_dim + self.q_lora_rank
        return self.projected(heads) + narrow + self.cached + 2 * absorbed + widened

    def rows(self, heads: int) -> list[tuple[str, tuple[int, ...], str]]:
        """The parameters that widen what was narrowed, and their norms: name, shape, and the name of its role."""
        rank = self.kv_lora_rank
        widened = heads * (self.qk_nope_head_dim + self.v_head_dim)
        latents = [("kv_a_norm", (rank,), "norm"), ("kv_b", (widened, rank), "latent")]
        if not self.q_lora_rank:
            return [*latents]
        narrow = (self.q_lora_rank,)
        return [("q_a_norm", narrow, "norm"), ("q_b", (heads * self.qk_head_dim, *narrow), "linear"), *latents]

    def projected(self, heads: int) -> int:
        """Rows of that projection: `queries`, then what is cached."""
        return self.queries(heads) + self.cached
