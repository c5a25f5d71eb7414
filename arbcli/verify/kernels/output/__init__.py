"""Verification of the operations in `arbcli.kernels.output`."""
