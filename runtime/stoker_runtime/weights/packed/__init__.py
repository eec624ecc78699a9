"""Weights that lie in several tensors each: integers and floats of four bits, of linear layers and of experts.

`integer_files.py`, `fp4_files.py` and `mxfp4.py` know how files hold them, `load.py` and `experts_load.py` bring them
to the device; `announce.py` says at a start what weights are in. Where those of experts rest,
`weights/expert_places.py` says.
Must never know: how products are computed. A new packing: a module beside `fp4_files.py`, and its branch in `load.py`.
"""
