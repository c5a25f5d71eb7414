"""Memory of each process of a distributed run, predicted for any number or measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from arbcli.config.training import TrainConfig
from arbcli.inspect.audit import AuditReport, audit
from arbcli.inspect.memory import model_of_run, predict_run
from arbcli.inspect.peak import PeakReport, predict_peak
from arbcli.training.parallel.group import Group
from arbcli.training.parallel.owners import assign_owners, owner_buffers
from arbcli.training.trainer import check_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Memory of one process of several between steps."""

    rank: int
    weights: int
    """Number of weights that the process owns."""
    kept_bytes: int
    """Its own shard: remainders, moments and statistics of the tensors that it owns."""
    state_bytes: int
    """Size of its own shard and of the replicated state, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One process of a shared run."""

    share: Share
    predicted_peak: PeakReport
    measured: AuditReport | None
    """Measurement; None if it was only predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReport:
    """All processes of a shared run."""

    device: str
    batch: int
    accum: int
    reduce_dtype: str
    state_bytes: int
    """Size of the state in bytes in a run of a single process."""
    budget_bytes: int | None
    """Memory budget of each process; None if none was given."""
    ranks: tuple[RankReport, ...]
    passed: bool
    """Whether each process fits the budget, and all checks of measurements passed."""


def predict_ranks(
    config: TrainConfig,
    size: int,
    budget: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> RanksReport:
    """Predict the memory of each of several processes.

    Args:
        config: configuration of a run that communicates gradients.
        size: number of processes.
        budget: bytes that each may take.
        progress: called with the subject of each prediction, before it.

    Raises:
        ArbError: the run cannot be shared by `size` processes.
    """
    check_shares(config, size)
    ranks = []
    for share in share_out(config, size):
        progress(f"predicting process {share.rank + 1} of {size}")
        peak = predict_peak(config, captured=True, rank=share.rank, size=size)
        ranks.append(RankReport(share=share, predicted_peak=peak, measured=None))
    return _report(config, ranks, budget)


def audit_ranks(config: TrainConfig, group: Group) -> RanksReport:
    """Measure real steps of a run that is shared by processes; collective.

    Args:
        config: configuration of the run; its device is that of this process.
        group: the processes.

    Returns:
        The report, the same in all processes.

    Raises:
        ArbError: the run cannot be shared by the processes, or there is not enough memory.
    """
    check_shares(config, group.size)
    share = share_out(config, group.size)[group.rank]
    measured = audit(config, group=group, state_bytes=share.state_bytes)
    report = RankReport(share=share, predicted_peak=measured.predicted_peak, measured=measured)
    return _report(config, group.collect(report), None)


def share_out(config: TrainConfig, size: int) -> list[Share]:
    """Compute the state of each of several processes between steps."""
    model = model_of_run(config)
    tensors = [tensor for tensor in model.packed_tensors().values() if not tensor.frozen]
    owners = assign_owners(tensors, size)
    weights, owned_bytes = [0] * size, [0] * size
    for tensor in tensors:
        owner = owners[id(tensor)]
        weights[owner] += tensor.num_weights
        owned_bytes[owner] += sum(part.nbytes for part in owner_buffers(tensor).values())
    replicated_bytes = sum(buffer.nbytes for buffer in model.buffers()) - sum(owned_bytes)
    return [
        Share(
            rank=rank,
            weights=weights[rank],
            kept_bytes=owned_bytes[rank],
            state_bytes=replicated_bytes + owned_bytes[rank],
        )
        for rank in range(size)
    ]


def _report(config: TrainConfig, ranks: list[RankReport], budget: int | None) -> RanksReport:
    fits = budget is None or all(r.predicted_peak.evaluated_bytes <= budget for r in ranks)
    if config.reduce_dtype is None:
        raise ValueError("processes can only share a run whose `reduce_dtype` is set")
    return RanksReport(
        device=torch.device(config.device).type,
        batch=config.batch,
        accum=config.accum,
        reduce_dtype=config.reduce_dtype,
        state_bytes=predict_run(config).total.state_bytes,
        budget_bytes=budget,
        ranks=tuple(ranks),
        passed=fits and all(rank.measured is None or rank.measured.passed for rank in ranks),
    )
