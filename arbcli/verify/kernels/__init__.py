"""How each operation of `arbcli.kernels` is verified, in files of the same names."""
