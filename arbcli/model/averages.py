"""Averages of weights over steps, which evaluations and readers of a checkpoint take.

`average` of a packed tensor, (N, K) int8, is the average of z in units of 2**`average_shift`. An
`Updater` moves it after each step: see `arbcli.kernels.update.average_weights`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import MAX_BYTE
from arbcli.kernels.codec.packing import pack_trits, unpack_trits
from arbcli.kernels.update.average_weights import average_weights
from arbcli.model.packed import TernaryTensor
from arbcli.model.packed_model import PackedModel
from arbcli.model.rules.base import Rule


def average_shift(rule: Rule) -> int:
    """Return the number of bits of z below those of its average."""
    return int(rule.radix + rule.remainder_max > 127)


def declare_averages(model: PackedModel) -> None:
    """Declare averages of all weights that are stepped."""
    for tensor in model.packed_tensors().values():
        if not tensor.frozen:
            shape, device = (tensor.out_features, tensor.in_features), tensor.trits.device
            tensor.declare(
                "average", torch.empty(shape, dtype=torch.int8, device=device), "average"
            )


@torch.no_grad()
def start_averages(model: PackedModel) -> None:
    """Set averages to the weights."""
    for tensor in _averaged_tensors(model):
        rule = tensor.rule
        below = rule.digits(tensor.state)["remainder"][0]
        z = unpack_trits(tensor.trits, tensor.in_features).to(torch.int16) * rule.radix + below
        tensor.average.copy_(z >> average_shift(rule))


def move_averages(
    tensors: list[TernaryTensor],
    key_of: Callable[[TernaryTensor], Tensor],
    turn: Tensor,
    rate: Tensor,
) -> list[Callable[[], None]]:
    """Return functions that move averages towards the weights, each by launching a kernel.

    Args:
        tensors: tensors with averages.
        key_of: returns a key of random bits, an int32 scalar tensor; the same in all steps.
        turn: int32 scalar tensor, the offset of thresholds of rounding.
        rate: int32 scalar tensor: see `arbcli.model.step_parameters.average_rates`.
    """
    return [
        partial(
            average_weights, tensor.trits, tensor.remainder, tensor.average, key_of(tensor), turn,
            rate, tensor.rule.radix, average_shift(tensor.rule), tensor.rule.share_a_byte
        )
        for tensor in tensors
    ]  # fmt: skip


def split_average(rule: Rule, average: Tensor, remainder: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed trits and remainders of averages, with the other bits of bytes as they are.

    Args:
        rule: rule of the tensor.
        average: (N, K) int8.
        remainder: (N, K) int8; with `share_a_byte` it has other bits.

    Returns:
        (N, bytes) uint8 and (N, K) int8.
    """
    # an average that was rounded up may be beyond the largest z
    limit, half = rule.radix + rule.remainder_max, rule.radix // 2
    z = (average.to(torch.int16) << average_shift(rule)).clamp(-limit, limit)
    trits = (z > half).to(torch.int8) - (z < -half).to(torch.int8)
    below = (z - trits * rule.radix).to(torch.int8)
    return pack_trits(trits), (remainder & -16 | below & 15) if rule.share_a_byte else below


@contextmanager
def averaged(model: PackedModel) -> Iterator[None]:
    """Read averages in place of the weights within the block."""
    with ExitStack() as stack:
        for tensor in _averaged_tensors(model):
            stack.enter_context(_averaged(tensor))
        yield


@contextmanager
def _averaged(tensor: TernaryTensor) -> Iterator[None]:
    weights, rule = (tensor.trits, tensor.remainder), tensor.rule
    if rule.reads_all and rule.fits_a_byte and not rule.share_a_byte:
        # z is the remainder of a trit of zero, so nothing is copied
        tensor.trits = torch.full_like(tensor.trits, MAX_BYTE // 2)
        tensor.remainder = tensor.average
    else:
        tensor.trits, tensor.remainder = split_average(rule, tensor.average, tensor.remainder)
    tensor.updates += 1  # tensors derived from other weights are outdated
    try:
        yield
    finally:
        tensor.trits, tensor.remainder = weights
        tensor.updates += 1


def _averaged_tensors(model: PackedModel) -> list[TernaryTensor]:
    return [tensor for tensor in model.packed_tensors().values() if hasattr(tensor, "average")]
