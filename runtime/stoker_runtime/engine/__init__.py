"""The engine's process and its front: messages, the step loop, constraints, streams, watchdog.

`engine.py` is the front in the API process, `core.py` the process, `step_loop.py` one step. A new message goes into
`messages.py`, something new to ask of an executor into `executor_protocol.py`.
Must never know: text, HTTP, how a batch runs on a device.
"""
