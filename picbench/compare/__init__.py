"""Runs held against each other and against baselines, and the statistics of both."""
