"""Arms that are OpenAI-compatible servers elsewhere."""
