"""Frozen, validated settings: the model's (from a checkpoint), the engine's, and each request's sampling."""
