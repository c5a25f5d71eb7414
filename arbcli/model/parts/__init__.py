"""Blocks of layers, and the parts of models."""
