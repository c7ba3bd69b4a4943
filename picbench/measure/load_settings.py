"""The arms and the request files of the measurement under load."""

#: Arms that are compared: MEPIC and prefix caching.
SUBJECT, PREFIX = "mepic", "prefix"

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
