"""Products in eight or four bits, in training."""


class LowPrecision:
    """A module that can multiply in FP8 or in NVFP4."""

    def multiply_in(self, number_format: str) -> bool:
        """Multiply in a format from now on, if the module's shapes allow it.

        Args:
            number_format: `fp8` or `nvfp4`.

        Returns:
            Whether the module has matrices that it multiplies in the format.
        """
        raise NotImplementedError


def fits(rows: int, columns: int) -> bool:
    """Return whether both sizes of a matrix are multiples of `MULTIPLE`."""
    from arbcli.kernels.matmul.fp8_matmul import MULTIPLE

    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0
