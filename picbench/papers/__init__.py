"""Papers' tables and figures, measured again: settings, runs, tables, pictures."""
