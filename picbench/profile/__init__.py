"""`picbench profile`: what a trace of requests could reuse, and what that is worth."""
