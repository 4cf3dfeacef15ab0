"""Benchmarks: scripts of the repository, not of the package."""
