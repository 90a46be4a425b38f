"""minice: a cross-encoder reranking runtime in NumPy."""

__version__ = "0.1.0"
