"""Kernels of the family `votes`."""
