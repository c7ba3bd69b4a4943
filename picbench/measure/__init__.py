"""Measurements and checks beside `picbench run`: kernels, the chunk store, tiers, engines, load."""
