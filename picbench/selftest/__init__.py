"""Negative controls: a harness that cannot see a broken cache is worth nothing."""
