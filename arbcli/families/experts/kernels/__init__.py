"""Kernels of the family `experts`."""
