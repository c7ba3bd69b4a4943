"""Sweeps: a grid over the settings of runs, a run directory for each cell of it."""
