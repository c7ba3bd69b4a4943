"""Attention over paged keys that are cached without RoPE, on CPU."""
