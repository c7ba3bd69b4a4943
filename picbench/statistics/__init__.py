"""Statistics of paired measurements: pure functions of arrays, seeded, without files or engines."""
