"""Traffic: which chunks requests share, how often, and when requests arrive.

`settings.py` has the parameters, `chunk_source.py` builds a `corpus.py` of chunks and questions,
`draw.py` draws requests from both, `ragpulse.py` takes those of a real trace, and `file.py` saves
them for replay.
"""
