"""Keys of the dropout masks of a step, from which kernels draw the masks."""

import torch

from arbcli.config.training import TrainConfig
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.layers.dropout import Dropout, Mask
from arbcli.model.step_parameters import loaded

SEED = int.from_bytes(b"drop")
"""Changes the seed of a run, so that masks and rounding use different random words."""


class DropoutKeys:
    """The keys of all masks and micro-batches of a step, in the same memory for every step.

    A mask depends on the seed, the step, the number of the micro-batch among those of all
    processes, the dropped tensor, and the place of the element in the micro-batch. A resumed run, a
    step shared by several processes, a recomputed block and a replayed CUDA graph have the same
    masks.

    Args:
        config: configuration of the run, with its seed and rates.
        branches: number of branches of the model.
        device: device of the keys.
    """

    def __init__(self, config: TrainConfig, branches: int, device: torch.device) -> None:
        self._config, self._branches = config, branches
        self._seed = torch.tensor(config.seed ^ SEED, dtype=torch.int32, device="cpu")
        self._numbers = torch.arange(config.accum, dtype=torch.int64, device="cpu")
        # of each micro-batch: outputs of branches, attention weights of branches, embedding
        shape = config.accum, 2 * branches + 1
        self._keys = torch.zeros(shape, dtype=torch.int32, device=device)

    def set_step(self, step: int) -> None:
        """Write the keys of a step to the device, without synchronisation."""
        ticks = (self._numbers + step * len(self._numbers)).to(torch.int32)
        keys = stream_keys(self._seed, ticks, self._keys.shape[1], 1)
        self._keys = loaded(keys[..., 0], self._keys)

    def select(self, micro: int) -> Dropout:
        """Return the dropout of a micro-batch of this step.

        Args:
            micro: number of the micro-batch among those of all processes.
        """
        config = self._config
        outputs, attention, embedding = self._keys[micro].split((self._branches,) * 2 + (1,))
        return Dropout(
            outputs,
            config.dropout,
            attention,
            config.attention_dropout,
            Mask(embedding[0], config.embedding_dropout) if config.embedding_dropout else None,
        )
