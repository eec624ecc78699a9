"""Which steps are CUDA graphs: the padded shapes of steps, those worth a graph, and those that have one.

Must never know: how a graph is captured, and tensors.
"""
