"""Engines on a GPU held to the oracle, and timed against each other."""
