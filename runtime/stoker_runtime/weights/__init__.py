"""From a model's files to its arena on the device: routing, decoding, quantizing, copying, and the head start.

A new quantization on disk: how it is read in `models/quantization/`, its scales and layout here (`fp8_scales.py`,
`layout.py`; of integers `integer_files.py`, of floats of four bits `fp4_files.py`), its product as a kind of weight in
the kernels.
Must never know: requests, steps, what a forward does with a weight.
"""
