"""Intervals and p values of paired, clustered and repeated measurements; functions of arrays."""
