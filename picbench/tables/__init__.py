"""One table, on a terminal and in files, and the table of a run."""
