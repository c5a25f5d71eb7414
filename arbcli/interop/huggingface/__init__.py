"""Folders of Transformers."""
