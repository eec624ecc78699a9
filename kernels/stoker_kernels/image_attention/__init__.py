"""Attention of the tokens of images, which see each other in both directions, over paged keys and values (Gemma 3).

`op.py` is the public function, `types.py` says which tokens are an image's, `reference.py` is the oracle and the way on
a CPU, `rows.py` the batch-invariant one there. On a GPU `launch.py` launches `triton_image.py` in tiles that `tiles.py`
chooses; what of it is compiled ahead is in `variants.py`.
Must never know: models, requests, what an image is of. What other tokens attend is `attention`'s.
"""

from stoker_kernels.image_attention.op import image_attention
from stoker_kernels.image_attention.types import ImageSpans

__all__ = ["ImageSpans", "image_attention"]
