"""From a gradient to an integer step."""
