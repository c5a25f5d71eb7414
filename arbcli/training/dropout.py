"""Keys of the dropout masks of a step, from which kernels draw the masks."""

import torch

from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.layers.dropout import Dropout
from arbcli.model.updater import loaded

SEED = int.from_bytes(b"drop")
"""Changes the seed of a run, so that masks and rounding use different random words."""


class DropoutKeys:
    """The keys of all branches and micro-batches of a step, in the same memory for every step.

    A mask depends on the seed, the step, the number of the micro-batch among those of all
    processes, the branch, and the place of the element in the micro-batch. A resumed run, a step
    shared by several processes, a recomputed block and a replayed CUDA graph have the same masks.

    Args:
        seed: seed of the run, 0..2**31-1.
        rate: probability that an element is dropped.
        accumulation: number of micro-batches in a step, over all processes.
        branches: number of branches of the model.
        device: device of the keys.
    """

    def __init__(
        self, seed: int, rate: float, accumulation: int, branches: int, device: torch.device
    ) -> None:
        self._seed = torch.tensor(seed ^ SEED, dtype=torch.int32, device="cpu")
        self._rate, self._branches = rate, branches
        self._numbers = torch.arange(accumulation, dtype=torch.int64, device="cpu")
        self._keys = torch.zeros(accumulation, branches, dtype=torch.int32, device=device)

    def set_step(self, step: int) -> None:
        """Write the keys of a step to the device, without synchronisation."""
        ticks = (self._numbers + step * len(self._numbers)).to(torch.int32)
        keys = stream_keys(self._seed, ticks, self._branches, 1)
        self._keys = loaded(keys[..., 0], self._keys)

    def of(self, micro: int) -> Dropout:
        """Return the dropout of a micro-batch of this step.

        Args:
            micro: number of the micro-batch among those of all processes.
        """
        return Dropout(self._keys[micro], self._rate)
