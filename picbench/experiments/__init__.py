"""What is measured over engines, by one runner: sweeps, checks, and the pages of results/."""
