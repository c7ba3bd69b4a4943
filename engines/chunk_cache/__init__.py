"""The chunk cache: chunk KV as objects of their own, and the tiers behind HBM."""
