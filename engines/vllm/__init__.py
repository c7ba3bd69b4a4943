"""The vLLM 0.32.0 plug-in, which carries out plans: frontend, scheduler, transfer, worker."""
