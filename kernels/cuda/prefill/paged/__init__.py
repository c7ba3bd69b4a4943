"""Paged prefill in place: few queries read keys from the pages of the cache (Hopper)."""
