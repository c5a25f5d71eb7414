"""Rotary positions, and attention to a cache."""
