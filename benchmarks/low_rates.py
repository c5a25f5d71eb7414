"""Tuning at low learning rates: how much of the gain of float weights is left on a grid.

    python -m benchmarks.low_rates TEXTS [--kinds KIND...] [--out DIR]

TEXTS and the float model are those of `benchmarks.tuning`. 2,000 steps at rates 30 and 100 times
lower than the default of tuning: a step moves a weight by a few thousandths of a unit of z.

`float`, `43`, `255` and `765` are one simulated optimizer that differs in the grid of the weights
alone: the direction of `moment` (orthogonal, of a float moment), steps as large as those of 255
levels, and scales that stay. After a step a weight goes back to the grid by a rounding: by
independent random bits (`random`), by low-discrepancy bits (`turned`), to the nearest level
(`nearest`), or to that with the error kept in float32 until the next step (`kept`). `moment`,
`nibble` and `moment factored` are the product, and AdamW is the float baseline.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from arbcli.data.text import Text, Texts
from arbcli.interop.huggingface.config_json import read_folder_config
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.interop.importing import read_float
from arbcli.model.baselines import FloatNumbers, FloatWeight
from arbcli.model.language_model import LanguageModel
from arbcli.training import trainer as training
from arbcli.training.float_optimizer import orthogonalise
from benchmarks.tuning import (
    RULES,
    Job,
    both_losses,
    options,
    prepared_folder,
    run_all,
    run_jobs,
    save_row,
    tune,
    tuned_twin,
    twin_trainer,
)

STEPS, BATCH = 2000, 16
GRIDS = {"float": None, "43": 21, "255": 127, "765": 382}
"""The last level of a grid."""
GROUP = 32
"""Neighbours that share a scale."""
DECAY = 0.9
TURN = 40503 / 65536
"""The golden ratio, as low-discrepancy bits turn by it."""
RUNS = {
    "float": (("none",), (1e-3, 3e-4)),
    "255": (("random", "turned", "nearest", "kept"), (3e-4, 1e-3)),
    "moment": (("random",), (3e-4, 1e-3)),
    "765": (("random", "turned"), (3e-4, 1e-3)),
    "nibble": (("turned",), (3e-4, 1e-3)),
    "43": (("random", "turned"), (3e-4, 1e-3)),
    "AdamW": (("none",), (1e-5, 3e-6)),
    "moment factored": (("random",), (3e-4, 1e-3)),
}
"""Roundings and rates, by kind; the most telling ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of tuning at a low rate."""

    kind: str
    rounding: str
    lr: float
    seed: int = 0
    steps: int = STEPS


def runs() -> list[Run]:
    """List all runs."""
    return [
        Run(kind=kind, rounding=rounding, lr=lr)
        for kind, (roundings, rates) in RUNS.items()
        for lr in rates
        for rounding in roundings
    ]


class GridSteps:
    """Steps float weights along the direction of `moment`, and rounds them to a grid.

    m <- 0.9 m + 0.1 g / rms(g); z <- round(z - 4 lr u(m)) in units of 255 levels, u having the
    singular values of m near 1 and rows of one length. z is the weight over the scale of its group,
    whose largest weight has the last level.

    Args:
        model: a float baseline, whose matrices step; gains of norms stay.
        last: level of the grid; None is float32.
        rounding: `random`, `turned`, `nearest` or `kept`; any for float32.
    """

    averages = False

    def __init__(self, model: LanguageModel, last: int | None, rounding: str) -> None:
        self.model, self.last, self.rounding = model, last, rounding
        self._lr, self._turn = (torch.zeros((), device=model.device) for _ in range(2))
        self.batches: list[tuple[list[Tensor], list[Tensor]]] = []
        """Matrices of one shape, and scale, z, moment and offset of the bits (B, N, K) of them."""

    def begin(self) -> None:
        """Store the current weights of the model."""
        shapes: dict[torch.Size, list[Tensor]] = {}
        for part in self.model.modules():
            if isinstance(part, FloatWeight) and not isinstance(part, FloatNumbers):
                shapes.setdefault(part.latent.shape, []).append(part.latent)
        for matrices in shapes.values():
            weights = torch.stack([matrix.detach() for matrix in matrices])
            groups = weights.unflatten(-1, (-1, GROUP))
            scale = groups.abs().amax(-1, keepdim=True) / (self.last or 127)
            scale = scale.clamp(min=1e-30).expand_as(groups).flatten(-2)
            z = weights / scale
            if self.last is not None and self.rounding != "kept":
                z = z.round()
            state = [scale, z, torch.zeros_like(z), torch.rand_like(z)]
            self.batches.append((matrices, state))
            self._write(matrices, scale, z)

    def set_step(self, step: int, lr: float, accumulation: int = 1) -> None:
        """Set the learning rate and the turn of the bits of the next step."""
        self._lr.fill_(lr)
        self._turn.fill_(step * TURN % 1)

    def begin_micro(self, micro: int) -> None:
        """Do nothing, as torch accumulates gradients."""

    @torch.no_grad()
    def finish(self) -> None:
        """Step every matrix, and drop the gradients."""
        for matrices, (scale, z, moment, offset) in self.batches:
            grad = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            size = grad.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
            moment.lerp_(grad / size, 1 - DECAY)
            direction = orthogonalise(moment).float()
            rows = direction.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
            z.sub_(direction / rows * (4 * (self.last or 127) / 127 * self._lr))
            if self.rounding == "random":
                z.add_(torch.rand_like(z)).floor_()
            elif self.rounding == "turned":
                z.add_((offset + self._turn) % 1).floor_()
            elif self.rounding == "nearest":
                z.round_()
            if self.last is not None:
                z.clamp_(-self.last, self.last)
            self._write(matrices, scale, z)
        for parameter in self.model.parameters():
            parameter.grad = None

    def _write(self, matrices: list[Tensor], scale: Tensor, z: Tensor) -> None:
        on_grid = z.round() if self.rounding == "kept" else z
        for matrix, weights in zip(matrices, on_grid * scale, strict=True):
            matrix.detach().copy_(weights)

    def state_tensors(self) -> list[Tensor]:
        """List what is kept between steps."""
        return [part for _, state in self.batches for part in state]


def simulate(run: Run, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune a float baseline on a grid."""
    novels = Texts(Text([texts / "novels-train.txt"]), Text([texts / "novels-val.txt"]), "")
    made: list[GridSteps] = []

    def steps_of(model: LanguageModel, _name: str, **_options: Any) -> GridSteps:
        made.append(GridSteps(model, GRIDS[run.kind], run.rounding))
        return made[0]

    torch.manual_seed(run.seed)
    with mock.patch.object(training, "FloatOptimizer", steps_of):
        trainer = twin_trainer(
            folder, novels, device=device, lr=run.lr, steps=run.steps, seed=run.seed, batch=BATCH
        )
    return tuned_twin(trainer, folder, texts, device, made[0].begin)


def tune_low(run: Run, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Run a job, and return its results."""
    if run.kind in GRIDS:
        return simulate(run, texts, folder, device)
    job = Job(part="low", kind=run.kind, lr=run.lr, seed=run.seed, steps=run.steps, batch=BATCH)
    return tune(job, texts, folder, device)


def main() -> None:
    """Train the float model, tune it in every way, and write the rows."""
    args = options("low_rates", "Compare grids and roundings at low rates.").parse_args()
    if args.jobs:
        run_jobs(args.jobs, Run, lambda run: tune_low(run, args.texts, args.folder, args.device))
        return
    kinds = [kind for kind in RULES if kind in RUNS and kind in (args.kinds or (kind,))]
    with prepared_folder(args, kinds) as folder:
        twin = read_float(WeightFolder(folder), read_folder_config(folder, weights="float"))
        begun = asdict(Run(kind="begun", rounding="none", lr=0.0, steps=0))
        losses = both_losses(twin.to(args.device).loss, args.texts, args.device)
        save_row("low_rates", begun | losses | {"state_bytes": 0, "seconds": 0.0}, args)
        run_all("low_rates", runs(), folder, args)


if __name__ == "__main__":
    main()
