"""Runs as one HTML file that needs no network: tables, figures, flipped answers."""
