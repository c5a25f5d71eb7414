"""Kernels of the family `streams`."""
