"""Scores of models whose weights the user has: measured, judged, set beside published gaps."""
