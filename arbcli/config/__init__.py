"""Configurations of models, presets and runs, without torch."""
