"""What libraries read once, when they are loaded: to be set before torch is imported."""

import os

SETTINGS = {
    # cuBLAS gives the same bits every time only if it has this workspace
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # threads that wait for each other soon give way: beside another busy program a training step
    # was seen to take 24 s instead of 0.3; with less than this it is slower alone
    "GOMP_SPINCOUNT": "2000",
}


def set_environment() -> None:
    """Set what the user has not."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
