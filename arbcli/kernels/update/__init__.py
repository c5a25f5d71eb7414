"""Kernels of the update: from gradients to integer steps."""
