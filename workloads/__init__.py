"""Data sets, prompts, chunks, scores and models: what a run sends and how replies are judged.

Nothing here imports an engine, torch or vllm; transformers, tokenizers and safetensors are
imported by the functions that need them.
"""
