"""Hopper kernels of mixtures, their host side: `sm90_few.py` runs experts of the fewest tokens and has them choose by
themselves, `sm90_packed.py` those in four bits, `sm90_grouped.py` those of many tokens, for which `sm90_unpacked.py`
makes bf16 of four bits; `sm90_route.py` chooses and sorts in one launch. `operands.py` says what the kernels of experts
read.

Must never know: for how many tokens other kernels are faster (`moe/choose.py`), and which layer is served.
"""
