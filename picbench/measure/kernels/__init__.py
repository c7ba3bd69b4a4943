"""Attention kernels by themselves, against the library's."""
