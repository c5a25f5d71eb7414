"""`orthogonal`: the orthogonalised gradient, with rows normalised to equal length.

Orthogonalisation is from Muon, and normalisation of rows from NorMuon. NorMuon uses a running mean
of the rows' squares; here the squares of the current step are as good, and need no state.
"""

import torch
from torch import Tensor

from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.kernels.update.gram_inverses import gram_inverses
from arbcli.kernels.update.unit_rows import unit_rows
from arbcli.model.optimizers.base import Direction, FactoredUpdate

SHIFTS = (1.89608180e-05, 9.18605963e-03)
POLAR_WEIGHTS = (0.961939909, 0.00921883, 0.18527752)
"""Coefficients of `approximate_polar`: f(s) = s (w_0 + w_1 / (s^2 + c_1) + w_2 / (s^2 + c_2)) is
within 0.155 of 1 for all s in 0.002 .. 1, which is optimal for its degree; below that it is at most
507 s."""


class Orthogonal(Direction):
    """Orthogonalisation of each matrix, with normalised rows."""

    reads_moment = True

    def values(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Orthogonalise (N, K), or each matrix of (B, N, K), on a GPU in `dtype`."""
        return orthogonalise(grad, dtype)

    def values_of(
        self, grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Orthogonalise matrices; on a GPU, matrices of equal shape are processed as a stack.

        The matrix library may use another algorithm for a stack, so last bits may differ.
        """
        if not grads or not grads[0].is_cuda:
            return super().values_of(grads, dtype)
        from arbcli.model.optimizers.newton_schulz import orthogonalise_stacked

        return orthogonalise_stacked(grads, dtype, squares)

    def factors(self, values: Tensor, gains: GradientGains, share: Tensor | None) -> FactoredUpdate:
        """Return values, (N, K), and gains that normalise the rows; rows of zeros stay zero."""
        unit = unit_rows(values, gains.ok)
        return FactoredUpdate(values, unit if share is None else unit * share.sqrt(), None)


def orthogonalise(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonalise a matrix approximately: by Newton-Schulz on a GPU, by inverses on a CPU.

    On a CPU an inverse costs as much as two products, and two inverses are as accurate as five
    Newton-Schulz steps. GPUs are slow at inverses.

    Args:
        grad: (N, K), or a stack (B, N, K), float32, bfloat16 or int8; each matrix finite. Matrices
            of zeros stay zero.
        dtype: dtype of products on a GPU; bfloat16 is sufficient.

    Returns:
        Like `grad`, of `dtype`; on a CPU float32.
    """
    if not (grad.is_cuda or grad.is_mps):
        return approximate_polar(grad)
    from arbcli.model.optimizers.newton_schulz import newton_schulz

    return newton_schulz(grad, dtype)


def approximate_polar(grad: Tensor) -> Tensor:
    """Orthogonalise a matrix approximately, with two inverses.

    On the smaller side of the matrix, X being (n, m) with n <= m and A = X X.T / s:

        Y = (w_0 + w_1 (A + c_1)^-1 + w_2 (A + c_2)^-1) X / sqrt(s),  s = |X X.T| >= sigma_max^2

    This is the best rational approximation of the sign function of degrees (5, 4). All sums are in
    float32, as A + c_1 has a condition number of up to 53,000. See `gram_inverses`.

    Source: Y. Nakatsukasa and R. Freund, "Computing fundamental matrix decompositions accurately
    via the matrix sign function in two iterations: the power of Zolotarev's functions",
    https://doi.org/10.1137/140990334, section 3.

    Args:
        grad: (N, K), or a stack (B, N, K), float32, bfloat16 or int8.

    Returns:
        Like `grad`, float32; not finite where `grad` is not.
    """
    grad = grad.float()
    tall = grad.shape[-2] >= grad.shape[-1]
    q = gram_inverses(grad.mT if tall else grad, SHIFTS, POLAR_WEIGHTS)
    return grad @ q if tall else q @ grad


DIRECTION = Orthogonal()
