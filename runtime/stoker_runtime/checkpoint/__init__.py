"""What the files of a model say of themselves: headers of safetensors and GGUF, and the tensors that they hold.

A new file format: its header reader here, giving `TensorEntry`s; what its values mean goes into `weights/`.
Must never know: architectures, devices, torch.
"""
