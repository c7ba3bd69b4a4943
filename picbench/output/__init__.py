"""What a run leaves: its directory, summaries, tables and figures."""
