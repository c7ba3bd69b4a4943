"""Traffic: which chunks requests share, how often, and when requests arrive.

`settings.py` says what can be asked for, `corpus.py` where chunks and questions come from,
`draw.py` draws requests from both, and `file.py` keeps them as a file that can be replayed.
"""
