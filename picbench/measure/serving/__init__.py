"""Engines under load, measured in rounds that go on where they were stopped."""
