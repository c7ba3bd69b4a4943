"""Traces: requests as users have them, read one by one."""
