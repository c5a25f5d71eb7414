"""Triton kernels, each beside its torch backend and its reference."""
