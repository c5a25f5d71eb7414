"""`sign`: one for every weight, with the sign of its gradient."""

from torch import Tensor

from arbcli.directions.base import Direction, Ingredients
from arbcli.kernels.update.gradient_gains import GradientGains


class Sign(Direction):
    """The sign of every element."""

    def ingredients(
        self, values: Tensor, gains: GradientGains, share: Tensor | None
    ) -> Ingredients:
        """No gains: kernels take the sign of the values."""
        return Ingredients(values, None, None)


DIRECTION = Sign()
