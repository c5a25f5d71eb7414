"""`sign`: the sign of each element of the gradient."""

from torch import Tensor

from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.model.optimizers.base import Direction, FactoredUpdate


class Sign(Direction):
    """The sign of every element."""

    def factors(self, values: Tensor, gains: GradientGains, share: Tensor | None) -> FactoredUpdate:
        """Return values, (N, K), without gains; kernels take their sign."""
        return FactoredUpdate(values, None, None)


DIRECTION = Sign()
