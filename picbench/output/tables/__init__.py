"""Runs as frames, and the files that are made of them."""
