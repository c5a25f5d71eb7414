"""Orthogonalisation on a GPU, by Newton-Schulz iterations of one matrix or of stacks."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from arbcli.kernels.update.newton_schulz import gram, gram_polynomial, shares_polynomial
from arbcli.kernels.update.unit_moment import unit_moments

TINY = 1e-30
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
RUNS = (3, 2)
"""Split of `STEPS` for wide matrices: the steps of a run are composed to one product."""
WIDE = 2
"""Smallest m / n of a wide matrix (n, m). Composition saves three products x @ x.T and three p @ x,
and costs nine products of (n, n) by (n, n); the two break even here, as symmetric products cost
half."""
WIDE_PRODUCTS = {"cpu": 0, "cuda": 2**31}
"""Smallest n * n * m of a stack of wide matrices, by kind of device; below it the three additional
launches on a GPU cost more than composition saves."""


def newton_schulz(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonalise a matrix approximately, with Newton-Schulz iterations.

    On the smaller side of the matrix, X being (n, m) with n <= m:

        X_k+1 = P(A_k) X_k,  A_k = X_k X_k.T,  P(A) = alpha I + beta A + gamma A A

    So X_k = Q_k X_0, and Q_k, (n, n), only depends on A_0. For wide matrices the steps of a run are
    composed to one Q, and X is multiplied twice per run instead of twice per step. But A has the
    squares of the singular values: small ones are lost to rounding, may become negative, and are
    then multiplied by 12 in every step. This is harmless for two or three steps, and diverges with
    five. So there are two runs, and the second restarts from the X of the first.

    Sources: K. Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, and for runs and
    restart Dao-AILab, "Gram Newton-Schulz", https://dao-lab.ai/blog/2026/gram-newton-schulz

    Args:
        grad: (N, K), or a stack (B, N, K); each matrix finite. Matrices of zeros stay zero.
        dtype: dtype of the products; bfloat16 is sufficient.

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
    """Apply `newton_schulz` to several matrices, with matrices of equal shape as a stack.

    Args:
        grads: matrices, (N, K) each.
        dtype: dtype of the products.
        squares: sums of squares of the matrices, int64 scalar tensors, if all are int8.

    Returns:
        Like `grads`, of `dtype`; views of the stacks.
    """
    results: list[Tensor] = [*grads]
    stacks = _normal_stacks(grads, dtype, squares)
    together: dict[int, list[tuple[list[int], bool, Tensor]]] = {}
    while stacks:
        indices, x = stacks.pop()
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        if max(_runs(x)) == 1 and shares_polynomial(x):
            together.setdefault(x.shape[-2], []).append((indices, tall, x))
            continue
        for steps in _runs(x):
            x = _product(_compose(gram(x), steps), x)
        for i, part in zip(indices, x.mT if tall else x, strict=True):
            results[i] = part
    for alike in together.values():
        all_indices, all_tall, xs = zip(*alike, strict=True)
        del alike[:]
        for indices, tall, x in zip(
            all_indices, all_tall, _orthogonalise_alike([*xs]), strict=True
        ):
            for i, part in zip(indices, x.mT if tall else x, strict=True):
                results[i] = part
    return results


def _orthogonalise_alike(stacks: list[Tensor]) -> list[Tensor]:
    """Apply all steps to stacks of equally many rows, each step with one polynomial of all stacks.

    Args:
        stacks: (B, n, m) each, n <= m; replaced as they are used.
    """
    sizes, (n, _) = [len(x) for x in stacks], stacks[0].shape[-2:]
    for _ in range(STEPS):
        squares = stacks[0].new_empty(sum(sizes), n, n)
        for x, square in zip(stacks, squares.split(sizes), strict=True):
            torch.bmm(x, x.mT, out=square)
        polynomials = gram_polynomial(squares, *COEFFICIENTS)
        del squares, square
        for i, q in enumerate(polynomials.split(sizes)):
            stacks[i] = _product(q, stacks[i])
    return stacks


def _normal_stacks(
    grads: list[Tensor], dtype: torch.dtype, squares: list[Tensor] | None
) -> list[tuple[list[int], Tensor]]:
    """Stack matrices of equal shape, divided by their norms; also return their indices."""
    order = sorted(range(len(grads)), key=lambda i: (grads[i].shape, str(grads[i].dtype)))
    stacks: list[tuple[list[int], Tensor]] = []
    for shape, alike in groupby(order, key=lambda i: grads[i].shape):
        indices = [*alike]
        stack = grads[0].new_empty((len(indices), *shape), dtype=dtype)
        if squares is None:
            _divide_by_norms([grads[i] for i in indices], stack)
        stacks.append((indices, stack))
    if squares is not None:
        parts = (
            (i, part) for indices, stack in stacks for i, part in zip(indices, stack, strict=True)
        )
        unit_moments((grads[i], squares[i], part) for i, part in parts)
    return stacks


def _divide_by_norms(grads: list[Tensor], out: Tensor) -> None:
    """Write matrices of equal shape, divided by their norms, to a stack.

    Args:
        grads: matrices, (N, K) each, sorted by dtype.
        out: (B, N, K).
    """
    begin = 0
    for _, group in groupby(grads, key=lambda grad: grad.dtype):
        part = torch.stack([*group])
        _divide_by_norm(part, out[begin : begin + len(part)])
        begin += len(part)


def _divide_by_norm(x: Tensor, out: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.to(out.dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return torch.div(x, norm + TINY, out=out)


def _runs(x: Tensor) -> Sequence[int]:
    """Return the number of steps of each run, for a matrix (n, m) or a stack, n <= m.

    The loop over runs is in the callers, which replace x: a function would keep its argument alive
    while it runs, at least after torch's compiler was used.
    """
    n, m = x.shape[-2:]
    least = WIDE_PRODUCTS.get(x.device.type, WIDE_PRODUCTS["cuda"])
    return RUNS if m >= WIDE * n and x.numel() * n >= least else [1] * STEPS


def _product(q: Tensor, x: Tensor) -> Tensor:
    """Return q @ x in the memory layout of x, as the step reads rows of tall matrices, too."""
    return q @ x if x.stride(-1) == 1 else (x.mT @ q.mT).mT


def _compose(square: Tensor, steps: int) -> Tensor:
    """Return the product Q of consecutive Newton-Schulz steps.

    A_k = Q_k A_0 Q_k.T and Q_k+1 = P(A_k) Q_k. Polynomials of A commute, but rounded ones do not.
    This order is robust: A_k always belongs to X_k = Q_k X_0, for any rounding of Q_k.

    Args:
        square: (n, n) or (B, n, n), A_0.
        steps: number of steps, 1 or more.

    Returns:
        Like `square`.
    """
    q = gram_polynomial(square, *COEFFICIENTS)
    for _ in range(steps - 1):
        q = gram_polynomial(q @ (square @ q.mT), *COEFFICIENTS) @ q
    return q
