"""Export of the weights alone, in the format of a checkpoint: trits, scales and their origin.

Where weights are all digits, the remainders are among them.
"""

from pathlib import Path

from arbcli.generation.load import Weights
from arbcli.model.checkpoint import Checkpoint, write_checkpoint


def write_inference(path: Path, weights: Weights) -> None:
    """Write a file that `arb generate`, `arb evaluate` and `arbcli.load` read.

    Its `data` has two fields besides those of the checkpoint: `origin`, the digest of that, and
    `compute`, what the run was trained in.

    Raises:
        ArbError: it cannot be written.
    """
    checkpoint = weights.checkpoint
    about = {"origin": weights.origin, "compute": weights.compute}
    write_checkpoint(
        path,
        Checkpoint(
            step=checkpoint.step,
            config=checkpoint.config,
            counters={},
            data=checkpoint.data | about,
            tensors=weights.model.state_dict(),
        ),
    )
