"""Multi-head latent attention over paged latents (DeepSeek): one latent and one rotated key a token for all heads.

`op.py` holds the public functions, `shapes.py` what follows from their tensors, `reference.py` the oracle,
`cpu_latent.py` the way on a CPU.
Must never know: models, projections, requests, how pages are dealt. What a step tells is `attention`'s AttentionMeta.
"""

from stoker_kernels.latent_attention.op import latent_attention, latent_rope_write

__all__ = ["latent_attention", "latent_rope_write"]
