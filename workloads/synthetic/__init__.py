"""Synthetic rows about an invented world, for the bundled data sets and the testbed model."""
