"""Kernels and models against their references."""
