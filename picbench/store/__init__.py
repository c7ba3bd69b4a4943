"""Run directories: what is kept of a run, written and read."""
