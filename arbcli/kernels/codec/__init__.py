"""Between packed bytes and weights: trits, scales, and eight-bit numbers."""
