"""Figures of the README and the documents, each against its peer in one run: `make bench`."""

import sys

from arbcli.base.environment import set_environment

set_environment(spins="--weights" not in sys.argv)  # a baseline has libgomp's default
