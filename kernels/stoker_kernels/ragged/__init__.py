"""From rows of different lengths to flat token arrays, on the device.

`op.py` is the public function, `types.py` what it takes and fills, `triton_ragged.py` the kernel, `reference.py` the
oracle.
Must never know: requests, and who owns a page.
"""

from stoker_kernels.ragged.op import prepare_ragged
from stoker_kernels.ragged.types import RaggedOutputs, RaggedRows, SlotTensors

__all__ = ["RaggedOutputs", "RaggedRows", "SlotTensors", "prepare_ragged"]
