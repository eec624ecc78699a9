"""Hopper kernels of mixtures, their host side: `sm90_route.py` chooses and sorts for some dozens of tokens.

Must never know: for how many tokens other kernels are faster (`moe/choose.py`), and which layer is served.
"""
