"""Encoding and decoding of packed weights: trits, scales, and eight-bit numbers."""
