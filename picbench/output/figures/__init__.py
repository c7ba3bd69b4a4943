"""Figures of results. matplotlib is imported where it draws, and nowhere else."""
