"""Two runs, or two arms of a run, sample by sample."""
