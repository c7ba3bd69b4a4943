"""The invented world and the texts about it."""
