"""Kernels of the family `hnet`."""
