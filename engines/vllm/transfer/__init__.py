"""Chunk KV on its way between the pool and the tiers."""
