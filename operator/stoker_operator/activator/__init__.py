"""Holds the requests of services that sleep, until a pod of theirs is ready. `stoker activator`.

`main.py` is the process, `settings.py` what it is told; `directory.py` knows the services and their pods, `line.py` the
requests that wait, in order, `wake.py` asks for pods. `doors.py` listens at the services' ports, `handler.py` takes a
request there, `forward.py` carries it to a pod, `answers.py` is what is said in a pod's place, `bodies.py` what is kept
in memory meanwhile.
Must never know: plans, manifests but the EndpointSlice that leads here, any key's value.
A path that must not wake anybody: `QUIET` in `answers.py`.
"""
