"""Products with packed matrices."""
