"""Residual streams: the weights that mix them, and the mixing."""
