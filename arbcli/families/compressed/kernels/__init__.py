"""Kernels of the family `compressed`."""
