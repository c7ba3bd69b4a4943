"""Decode attention of planned requests on CUDA."""
