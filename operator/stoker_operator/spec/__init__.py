"""The typed InferenceService, and what it is read with. The only reader of raw objects that users write.

Must never know: the cluster, pods, plans. A new field: `service.py` or the part it belongs to, and the CRD.
"""
