"""Import of models of other programs: configurations, tensor names and weights."""
