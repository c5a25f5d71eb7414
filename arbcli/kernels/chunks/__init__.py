"""Chunks of a sequence: where they are, what they hold, and what they give back to positions."""
