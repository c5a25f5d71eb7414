"""Triton kernels, each with its torch backend and its reference."""
