"""Attention over paged keys that are cached without RoPE, or with RoPE of other positions."""
