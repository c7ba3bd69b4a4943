"""Benchmarks of the kernels; each module is a command (`python -m`)."""
