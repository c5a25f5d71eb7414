"""Figures of the README, each beside its peer in one run: `make bench`."""

from arbcli.environment import set_environment

set_environment()  # as `arb` has it
