"""`arb verify-kernels`."""


def verify_kernels() -> None:
    """Do it."""
