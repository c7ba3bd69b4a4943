"""Figures of runs, plans and papers, in one style."""
