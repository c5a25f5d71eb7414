"""`arb probe-loss`."""


def probe_loss() -> None:
    """Do it."""
