"""Models of other programs: imports and exports."""
