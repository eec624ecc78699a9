"""What all ops share: dispatch by device and dtype, kernels compiled ahead and at need, cubins, dependent launch, nvcc.

Must never know: what any op computes. Import from its modules: each is needed at another moment, some before torch.
"""
