"""Remote tiers of the chunk cache: where canonical KV rests when it is not in HBM.

    base.py       what a tier is: bytes under keys, batched, synchronous
    host.py disk.py redis.py lmcache.py mooncake.py     one kind each
    envelope.py   a value with a checksum, so that no tier can lie about content
    guard.py      one tier kept within time and bounds of failure, and counted
    stack.py      tiers in order, asynchronous: what the engine talks to
    spec.py       the notation of `--tiers`

Nothing here imports torch or vllm; a kind's client library is imported when the tier is opened.
"""
