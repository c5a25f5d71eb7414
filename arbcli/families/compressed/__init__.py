"""Attention to compressed entries."""
