"""Requests before the scheduler: their arguments, limits and hashes."""
