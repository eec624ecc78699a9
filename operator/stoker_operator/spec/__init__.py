"""The typed InferenceService, and what it is read with. The only reader of objects that users write.

`service.py` is the whole and the model, `pods.py` what pods get, `operations.py` how they scale and change,
`endpoint.py` how they are reached; `reader.py` reads a field or says what is wrong with it, `engine_arguments.py` reads
`runtime.args` as the engine does (its names: `engine_table.py`), `engine_guard.py` refuses what is not theirs to set,
`engine_flags.py` reads what they tell the engine, `later.py` names what a later version is to have.
Must never know: the cluster, pods, plans. A new field: CONTRIBUTING.md, "Add a field to the CRD".
"""
