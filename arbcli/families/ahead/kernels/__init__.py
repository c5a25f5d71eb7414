"""Kernels of the family `ahead`."""
