"""The workers' processes: positions, rotation and attention of planned requests."""
