"""Multi-head latent attention over paged latents (DeepSeek): one latent and one rotated key a token for all heads.

`op.py` holds the public functions, `shapes.py` what follows from their tensors, `reference.py` the oracle,
`cpu_latent.py` the way on a CPU, `rows.py` the batch-invariant one. On a GPU `triton_write.py` norms, rotates and
writes, `triton_absorbed.py` attends latents, `triton_widened.py` chunks; `triton_launch.py` launches them in tiles that
`tiles.py` chooses. On Hopper latents are csrc/sm90_latent's: `sm90_latent.py` is its host side and says what it takes,
`triton_plan.py` deals keys to its CTAs. `variants.py` says what is compiled ahead, `bench.py` checks and times.
Must never know: models, projections, requests, how pages are dealt. What a step tells is `attention`'s AttentionMeta.
"""

from stoker_kernels.latent_attention.op import latent_attention, latent_rope_write, plan_latent_attention

__all__ = ["latent_attention", "latent_rope_write", "plan_latent_attention"]
