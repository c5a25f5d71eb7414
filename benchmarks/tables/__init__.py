"""The tables of README.md and `docs/`, written from `docs/results/`: one module for each page."""
