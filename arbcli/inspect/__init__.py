"""Looking inside: counts, memory, and what a few steps do."""
