"""Products in NVFP4."""
