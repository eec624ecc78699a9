"""Pure: what a replica that spans nodes is made of: a LeaderWorkerSet, and what stands around its groups.

Must never know: what is in the cluster, but for what a live object of the same name must keep.
The API is LeaderWorkerSet's v1: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
"""
