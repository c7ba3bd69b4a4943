"""Papers' tables and figures, measured anew: settings, runs, tables, pictures."""
