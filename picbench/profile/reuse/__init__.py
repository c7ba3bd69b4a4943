"""What caches would reuse of a trace, counted without an engine."""
