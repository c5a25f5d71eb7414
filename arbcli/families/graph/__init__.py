"""N-grams, codebooks, iterated experts on a graph, router and memory of n-grams."""
