"""What all ops share: dispatch by device and dtype, kernels compiled ahead and at need, cubins, dependent launch, nvcc.

`dispatch.py` chooses an implementation, by what `chip.py` says that a GPU has, `triton_kernel.py` launches a Triton
kernel (precompiled by `aot.py`, described in `aot_index.py`), `cuda.py` a CUDA one (compiled by `nvcc.py`), `pdl.py`
lets kernels overlap; `triton_fp8.py` and `triton_tile.py` are device functions of several ops. `cc.py` compiles C for
CPUs, `cpu_dot.py` and `each_row.py` are what batch-invariant ops share there.
Must never know: what any op computes. Import from its modules: each is needed at another moment, some before torch.
"""
