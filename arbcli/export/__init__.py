"""Trained models in the forms that other programs read, and what is in such a file."""
