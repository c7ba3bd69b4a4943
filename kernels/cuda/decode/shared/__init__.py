"""Decode in which the blocks that several requests see are read once for all of them."""
