"""`arb audit-memory`."""


def audit_memory() -> None:
    """Do it."""
