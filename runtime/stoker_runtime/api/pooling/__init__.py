"""The routes of models that embed or score: embeddings, pooling, scores, reranking.

Must never know: how vectors are computed. A new field: `bodies.py`.
"""
