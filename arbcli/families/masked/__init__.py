"""Masked and fill-in objectives."""
