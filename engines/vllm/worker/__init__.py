"""The workers' processes: positions, RoPE and attention of planned requests."""
