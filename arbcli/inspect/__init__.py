"""Inspection of models and runs: counts, memory, and probes of training steps."""
