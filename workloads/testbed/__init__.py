"""The testbed."""
