"""Every algorithm in one engine: what it links, what it scores, and whether a batch changes it."""
