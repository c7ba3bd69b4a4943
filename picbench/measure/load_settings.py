"""The arms and the request files of the measurement under load."""

#: Arms that are compared: MEPIC, EPIC, whose requests copy the same chunks, prefix caching.
SUBJECT, PRIVATE, PREFIX = "mepic", "epic:k=16", "prefix"

#: Blocks of 16 tokens in the pool of each arm under load; three arms are up at once.
POOL = 12_000

#: Chunks of about 170 tokens each, as in MiniPIC's throughput on 2WikiMQA, at a rate that no arm
#: keeps up with; and long ones at a rate that mepic keeps up with, while private copies, of about
#: 640 blocks a request, fill the pool.
LOADS = {
    "throughput": {
        "chunk-tokens": 90,
        "chunks": 10,
        "pool": 256,
        "requests": 1000,
        "rate": 500,
        "max-tokens": 16,
    },
    "memory": {
        "chunk-tokens": 480,
        "chunks": 16,
        "pool": 24,
        "requests": 200,
        "rate": 10,
        "max-tokens": 128,
    },
}
