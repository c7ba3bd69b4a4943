"""What happens to a request before it reaches the scheduler: its arguments, limits and hashes."""
