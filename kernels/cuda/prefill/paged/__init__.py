"""Paged prefill in place: few queries read keys where they lie (Hopper)."""
