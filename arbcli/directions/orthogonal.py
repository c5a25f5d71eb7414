"""`orthogonal`: the gradient with its singular values pushed towards 1, and rows of one length.

The first is Muon's, the second NorMuon's, which takes a running mean of the rows' squares; that of
the one step does as well here, and nothing is stored for it.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from arbcli.directions.base import Direction, Ingredients
from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.kernels.update.gram_inverses import gram_inverses
from arbcli.kernels.update.newton_schulz import gram, gram_polynomial
from arbcli.kernels.update.unit_moment import unit_moments
from arbcli.kernels.update.unit_rows import unit_rows

TINY = 1e-30
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
RUNS = (3, 2)
"""The same for wide matrices: steps that are composed before the matrix is multiplied by them."""
WIDE = 2
"""Smallest m / n of a wide matrix, (n, m). Composing saves three products x @ x.T and three p @ x,
for nine of (n, n) by (n, n); with symmetric products at half price that is even here."""
WIDE_PRODUCTS = {"cpu": 0, "cuda": 2**31}
"""Smallest n * n * m, of all matrices of a stack, by kind of device: below it three more launches
of a GPU take what is saved."""


SHIFTS = (1.89608180e-05, 9.18605963e-03)
POLAR_WEIGHTS = (0.961939909, 0.00921883, 0.18527752)
"""Of `_near_polar`: f(s) = s (w_0 + w_1 / (s^2 + c_1) + w_2 / (s^2 + c_2)) is within 0.155 of 1 for
all s in 0.002 .. 1, and no other such function comes nearer; below it is at most 507 s."""


class Orthogonal(Direction):
    """A matrix whole, or each of a stack: it wants every singular value alike."""

    takes_average = True

    def values(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Orthogonalise (N, K), or each matrix of (B, N, K), on a GPU in `dtype`."""
        return orthogonalise(grad, dtype)

    def values_of(
        self, grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Orthogonalise matrices, on a GPU those of one shape as a stack.

        The matrix library may choose another algorithm for a stack: last bits are its own.
        """
        if not grads or not grads[0].is_cuda:
            return super().values_of(grads, dtype)
        return orthogonalise_stacked(grads, dtype, squares)

    def ingredients(
        self, values: Tensor, gains: GradientGains, share: Tensor | None
    ) -> Ingredients:
        """Find the gains of the rows; those that do not take part are zero, and stay so."""
        unit = unit_rows(values, gains.ok)
        return Ingredients(values, unit if share is None else unit * share.sqrt(), None)


def orthogonalise(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Push the singular values of a matrix towards 1: on a GPU by products, on a CPU by inverses.

    An inverse of a matrix takes a CPU the time of two products, and two inverses are as good as
    five Newton-Schulz steps. A GPU is slow at inverses.

    Args:
        grad: (N, K), or a stack (B, N, K), float32, bfloat16 or int8; each matrix finite. One of
            zeros stays so.
        dtype: of products on a GPU; bfloat16 is enough.

    Returns:
        Like `grad`, of `dtype`; on a CPU float32.
    """
    on_gpu = grad.is_cuda or grad.is_mps
    return newton_schulz(grad, dtype) if on_gpu else near_polar(grad)


def near_polar(grad: Tensor) -> Tensor:
    """Push the singular values of a matrix towards 1 with two inverses.

    On the smaller side of the matrix, X being (n, m) with n <= m and A = X X.T / s:

        Y = (w_0 + w_1 (A + c_1)^-1 + w_2 (A + c_2)^-1) X / sqrt(s),  s = |X X.T| >= sigma_max^2

    This is the rational function of the degrees (5, 4) that is nearest to the sign. All is summed
    in float32: A + c_1 has a condition of up to 53,000. See `gram_inverses`.

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


def newton_schulz(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Push the singular values of a matrix towards 1 with Newton-Schulz iterations.

    On the smaller side of the matrix, X being (n, m) with n <= m:

        X_k+1 = P(A_k) X_k,  A_k = X_k X_k.T,  P(A) = alpha I + beta A + gamma A A

    So X_k = Q_k X_0, and Q_k, (n, n), is found from A_0 alone. For wide matrices the steps of a run
    are composed to one Q, and X is multiplied twice a run instead of twice a step. A has the
    squares of the singular values, though: small ones are lost in its rounding, may come back below
    zero, and are then multiplied by 12 with every step. Two or three steps do not show it, five
    diverge. So there are two runs, and the second restarts from the X of the first.

    Sources: K. Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, and for runs and
    restart Dao-AILab, "Gram Newton-Schulz", https://dao-lab.ai/blog/2026/gram-newton-schulz

    Args:
        grad: (N, K), or a stack (B, N, K); each matrix finite. One of zeros stays so.
        dtype: of the products; bfloat16 is enough.

    Returns:
        Like `grad`, of `dtype`.
    """
    tall = grad.shape[-2] > grad.shape[-1]
    x = grad.mT if tall else grad
    x = _divide_by_norm(x, torch.empty_like(x, dtype=dtype))
    for steps in _runs(x):
        x = _product(_compose(gram(x), steps), x)
    return x.mT if tall else x


def orthogonalise_stacked(
    grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None = None
) -> list[Tensor]:
    """Do as `newton_schulz` does, for several matrices, with those of one shape as a stack.

    Args:
        grads: (N, K) each.
        dtype: of the products.
        squares: int64 scalar tensors, the sum of the squares of each, if all are int8.

    Returns:
        Like `grads`, of `dtype`, parts of the stacks.
    """
    found: list[Tensor] = [*grads]
    stacks = _normal_stacks(grads, dtype, squares)
    while stacks:
        places, x = stacks.pop()
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        for steps in _runs(x):
            x = _product(_compose(gram(x), steps), x)
        for i, part in zip(places, x.mT if tall else x, strict=True):
            found[i] = part
    return found


def _normal_stacks(
    grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None
) -> list[tuple[list[int], Tensor]]:
    """Stack matrices of one shape, each of norm 1, and tell the place of each among all."""
    order = sorted(range(len(grads)), key=lambda i: (grads[i].shape, str(grads[i].dtype)))
    stacks: list[tuple[list[int], Tensor]] = []
    for shape, alike in groupby(order, key=lambda i: grads[i].shape):
        places = [*alike]
        stack = grads[0].new_empty((len(places), *shape), dtype=dtype)
        if squares is None:
            _divide_by_norms([grads[i] for i in places], stack)
        stacks.append((places, stack))
    if squares is not None:
        parts = (
            (i, part) for places, stack in stacks for i, part in zip(places, stack, strict=True)
        )
        unit_moments((grads[i], squares[i], part) for i, part in parts)
    return stacks


def _divide_by_norms(grads: list[Tensor], out: Tensor) -> None:
    """Fill a stack with matrices of one shape, those of a dtype side by side, each of norm 1."""
    begin = 0
    for _, some in groupby(grads, key=lambda grad: grad.dtype):
        part = torch.stack([*some])
        _divide_by_norm(part, out[begin : begin + len(part)])
        begin += len(part)


def _divide_by_norm(x: Tensor, out: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.to(out.dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return torch.div(x, norm + TINY, out=out)


def _runs(x: Tensor) -> Sequence[int]:
    """Tell how many steps each run of the iteration has, for (n, m) or a stack of them, n <= m.

    The iteration itself is written where x is replaced: Python may keep what a function is given
    alive for as long as that runs, and does so once torch's compiler was used.
    """
    n, m = x.shape[-2:]
    least = WIDE_PRODUCTS.get(x.device.type, WIDE_PRODUCTS["cuda"])
    return RUNS if m >= WIDE * n and x.numel() * n >= least else [1] * STEPS


def _product(q: Tensor, x: Tensor) -> Tensor:
    """Multiply q @ x, the result lying as x does: a step reads the rows of a tall matrix, too."""
    return q @ x if x.stride(-1) == 1 else (x.mT @ q.mT).mT


def _compose(square: Tensor, steps: int) -> Tensor:
    """Find the Q of so many Newton-Schulz steps in a row: A_k = Q_k A_0 Q_k.T, Q_k+1 = P(A_k) Q_k.

    Polynomials of A commute, rounded ones do not. In this order that does not matter: every A is of
    the X that Q gives, whatever Q is.

    Args:
        square: (n, n) or (B, n, n), A_0.
        steps: 1 or more.

    Returns:
        Like `square`.
    """
    q = gram_polynomial(square, *COEFFICIENTS)
    for _ in range(steps - 1):
        q = gram_polynomial(q @ (square @ q.mT), *COEFFICIENTS) @ q
    return q


DIRECTION = Orthogonal()
