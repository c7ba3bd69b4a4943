"""The testbed model: training, and reuse of its keys and values without an engine."""
