"""Checks and measurements on a GPU host; see `picbench.gpu.steps`."""
