"""The benchmark of attention: `python -m stoker_kernels.attention.bench`, right first, then how fast.

`works.py` says what is timed, `configs.py` with which configurations, `case.py` puts a batch on the GPU, `measure.py`
checks and times one, `sweeps.py` and `mixed.py` print the tables.
Must never know: the engine. It measures the op alone.
"""
