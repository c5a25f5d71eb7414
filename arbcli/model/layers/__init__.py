"""Layers over packed tensors."""
