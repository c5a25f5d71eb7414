"""Inference: loading, generation, evaluation and filling of holes."""
