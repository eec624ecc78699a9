"""From rows of different lengths to flat token arrays, on the device."""

from stoker_kernels.ragged.op import RaggedOutputs, RaggedRows, SlotTensors, prepare_ragged

__all__ = ["RaggedOutputs", "RaggedRows", "SlotTensors", "prepare_ragged"]
