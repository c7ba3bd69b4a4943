"""What picbench adds to vLLM's scheduler, timed without an engine around it."""
