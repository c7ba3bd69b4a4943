"""Attention over paged keys on CUDA: Triton and Gluon kernels, and FlashAttention-3 if it serves.

A key is cached with RoPE of some position, `cached_at`, and read at another. The difference is its
RoPE shift:

    rope_shift[slot] = logical position - cached_at

It is 0 for slots that a request computes itself, constant over a chunk that was compiled elsewhere,
and the logical position itself for keys that are cached without RoPE. Since a rotation by s
satisfies <q, R(s) k> = <R(-s) q, k>, kernels either rotate keys by their shift or re-rotate the
query by the opposite of it, once for all keys that share it.
"""
