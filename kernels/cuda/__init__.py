"""Attention over paged keys on CUDA: Triton kernels of our own, and FlashAttention where it serves.

A key *rests* rotated at some position and is read at another; the difference is its *turn*:

    turn[slot] = logical position - position at which the key rests

It is 0 for computed slots, constant over a chunk whose keys rest as its compile request left them,
and the logical position itself for keys that rest unrotated.
"""
