"""Speculative decoding with a second head."""
