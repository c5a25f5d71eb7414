"""Models of other programs: their configurations, names and weights, and a checkpoint of them."""
