"""Layers with packed weights."""
