"""Attention over paged KV whose keys may be unrotated: reference, CPU, benchmarks."""
