"""`arb count-params`."""


def count_params() -> None:
    """Do it."""
