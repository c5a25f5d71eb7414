"""Triton kernels, each next to its torch backend and its reference."""
