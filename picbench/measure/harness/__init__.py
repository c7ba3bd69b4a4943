"""What the harness itself costs: commands, and a run's work beside its engines."""
