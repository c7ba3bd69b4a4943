"""Plans: what sits in every KV slot of a request, where it is seen and how its block is keyed.

Nothing here imports torch or vllm.
"""
