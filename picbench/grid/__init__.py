"""Grids of measured cells: what arms took where, on which hardware."""
