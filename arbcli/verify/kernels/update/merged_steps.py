"""Verification of `arbcli.kernels.update.merged_steps`."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from arbcli.kernels.runtime.merged import merge_launches
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.kernels.update.step_scales import step_scales_verification
from arbcli.verify.verification import CaseGenerator, Verification

NUM_INPUTS = 8
"""Number of inputs of `step_scales`."""


def _split_matrices(inputs: tuple) -> Iterator[tuple]:
    """Split the concatenated inputs of several matrices."""
    for begin in range(0, len(inputs), NUM_INPUTS):
        yield inputs[begin : begin + NUM_INPUTS]


def _map_matrices(run: Callable) -> Callable:
    def run_all(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(itertools.chain(*(run(*part) for part in _split_matrices(inputs))))

    return run_all


def _merged_steps_triton(*inputs: Tensor) -> tuple[Tensor, ...]:
    runs = [partial(step_scales_verification.triton, *part) for part in _split_matrices(inputs)]
    merge_launches(runs, inputs[0].device)
    return tuple(itertools.chain(*(part[:2] for part in _split_matrices(inputs))))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    shapes = [(n, k), *((1 + rng.integer(n), 1 + rng.integer(k)) for _ in range(rng.integer(9)))]
    matrices = [step_scales_verification.drawn(rng, group_size, m, *shape) for shape in shapes]
    if rng.chance(0.5):  # one kind of launch; otherwise two kinds share a wave
        matrices = [(*inputs[:2], inputs[2].float(), *inputs[3:]) for inputs in matrices]
    return tuple(part for inputs in matrices for part in inputs)


merged_steps_verification = Verification(
    Operation("merged_steps", _merged_steps_triton, _map_matrices(step_scales_verification.torch)),
    _map_matrices(step_scales_verification.reference), draw=_draw, needs_rows=False,
)  # fmt: skip
