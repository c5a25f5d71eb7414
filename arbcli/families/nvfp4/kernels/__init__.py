"""Kernels of the family `nvfp4`."""
