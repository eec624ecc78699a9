"""What models are: specs read from their files, and the forward passes that run them.

A new architecture is a row of `architectures/` (an encoder of `encoders/table.py`) as long as `decoder.py` can run it;
its tensors' names stand in that row. A layer that it cannot run yet is a kind in `layers/`.
Must never know: requests, sampling, whose pages it reads, how weights came to the device.
"""
