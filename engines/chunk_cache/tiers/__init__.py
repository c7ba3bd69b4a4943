"""Remote tiers of the chunk cache: where canonical KV is kept outside HBM.

    tier.py            the interface: bytes by key, in batches, blocking
    backends/          one kind a file: host, disk, redis, lmcache, mooncake; an engine's nearest
                       host tier is not among them (`Arena` in engines/chunk_cache/arena.py)
    envelope.py        a value with a checksum, which detects corrupt and foreign values
    guarded_tier.py    one tier with deadlines and counters, which never raises
    stack.py           all tiers in order, on threads of their own: for the engine
    notation.py        parsing and opening ``host:4GiB,disk:/path:20GiB``

Nothing here imports torch or vllm; a kind's client library is imported when the tier is opened.
"""
