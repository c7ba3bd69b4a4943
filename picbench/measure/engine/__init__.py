"""Measurements of whole engines: against the oracle, against stock vLLM, on several GPUs."""
