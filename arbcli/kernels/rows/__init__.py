"""Rows looked up, weighted, gathered and scattered."""
