"""References and cases of the kernels of the family `graph`."""
