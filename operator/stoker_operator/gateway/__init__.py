"""One address for all models: tells Envoy which service answers for which model. `stoker gateway`.

`main.py` is the process, `settings.py` what it is told; `directory.py` follows the Services and their endpoints,
`models.py` decides who answers for a name, `keys.py` reads the API keys. `envoy.py` is the proxy's configuration,
`routes.py` the part of it that changes with the models, `prefix.py` what it reads of a prompt; `files.py` writes it for
Envoy to follow, `admin.py` asks Envoy how many requests it has.
Must never know: a request. They go through Envoy alone, and go on where this process ends.
What is said in a pod's place: `routes.py`.
"""
