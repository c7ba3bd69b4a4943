"""Plans carried out inside vLLM 0.32.0."""
