"""Checks and measurements of the CUDA kernels (`python -m picbench.kernels.bench.gpu`)."""
