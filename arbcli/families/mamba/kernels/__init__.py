"""Kernels of the family `mamba`."""
