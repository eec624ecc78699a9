"""LoRA adapters: PEFT folders read and checked against the model, their memory on host and device, a step's share.

`peft_config.py` reads what a folder says, `layout.py` decides where an adapter's matrices lie, `files.py` brings them
there, `memory.py` holds the device's slots, `step.py` is what a forward pass gets. A kind of adapter that is not served
is refused by name in `peft_config.py`.
Must never know: requests, who waits for which adapter, and what names clients use.
"""
