"""Traffic: which chunks requests share, how often, and when requests arrive.

`settings.py` has the parameters, `chunk_source.py` builds a `corpus.py` of chunks and questions,
`draw.py` draws requests from both, and `file.py` saves them for replay. `trace_file.py` reads those
of any log or trace (`logs.py`), with the chunks that `found_chunks.py` finds, and `replay.py` makes
samples of them.
"""
