"""Figures of the README, each beside its peer in one run: `make bench`."""
