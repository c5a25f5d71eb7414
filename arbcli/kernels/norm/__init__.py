"""Norms and the gate, forward and backward."""
