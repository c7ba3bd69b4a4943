"""Position-independent KV caching for vLLM, and the harness that measures it."""
