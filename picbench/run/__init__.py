"""A run: its settings, its protocol and its execution."""
