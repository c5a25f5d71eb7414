"""Kernels of the family `latent`."""
