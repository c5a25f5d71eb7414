"""Foundations of every kernel: the language, backends, launches, operations."""
