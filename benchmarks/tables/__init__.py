"""The tables of the README and of `docs/`, from `benchmarks/results/`: a module for a page."""
