"""Data sets, prompts, chunks, scores and models: what a run sends and how replies are scored.

Layers, highest first: testbed | traffic > load | scoring | facts > datasets > metrics | models >
prompts > sources > synthetic > names | sample.

Nothing here imports an engine, torch or vllm; transformers, tokenizers and safetensors are
imported by the functions that need them.
"""
