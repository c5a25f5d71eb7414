"""Kernels of the family `graph`."""
