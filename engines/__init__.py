"""Position-independent KV caching inside an inference engine.

`plan` and `algorithms` are policy and pure Python; `vllm` carries plans out inside vLLM; `oracle`
says what the right answer is. Import names from the modules; nothing heavy is loaded here.
"""
