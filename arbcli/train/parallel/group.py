"""The processes of a run: their ranks, and their messages.

Tensors on a GPU travel by NCCL, those on a CPU by gloo. Where all processes are on one machine both
use its loopback interface. Whatever is added up here is integers, so that no order matters.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from arbcli.errors import ArbError
from arbcli.train.parallel.launch import Place, this_process
from arbcli.train.parallel.rendezvous import SAME, WAIT, meet, seconds_to_join, within

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
"""Environment variables that choose the interface; with `=` NCCL takes the name exactly."""
CPU = torch.device("cpu")
ABORT_SECONDS = 15


class Group:
    """The processes that share a run; without arguments it is this one alone.

    Every method but the properties is called by all processes, in the same order.

    Args:
        rank: of this process, from 0; the first one writes and prints.
        size: how many there are.
        device: of the tensors that travel.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device = CPU) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.received = 0
        """Bytes of a step that all processes have received of others, added up."""
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def remember(self, graph: torch.cuda.CUDAGraph) -> None:
        """Know a captured step with messages in it, which must be gone before the processes part.

        NCCL waits for such graphs when it ends and when it is aborted, for ever if need be.
        """
        self._graphs.add(graph)

    def forget_graphs(self) -> None:
        """Free the captured steps that are still there."""
        for graph in [*self._graphs]:
            graph.reset()
        self._graphs.clear()

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def local(self, number: int) -> range:
        """List which of so many micro-batches are this process's."""
        each = number // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def send_to_owners(self, sent: Tensor, sizes: Sequence[int]) -> "Travelling":
        """Send each process its own part, and get from all what is this one's.

        Args:
            sent: bytes, one part after the other.
            sizes: of the parts.

        Returns:
            On its way: (processes, sizes[rank]) bytes, by rank.
        """
        if self.size == 1:
            return Travelling(sent[None])
        own = sizes[self.rank]
        result = sent.new_empty(self.size * own)
        with explained_loss():
            work = dist.all_to_all_single(result, sent, [own] * self.size, [*sizes], async_op=True)
        self.received += (self.size - 1) * sum(sizes)
        return Travelling(result.view(self.size, own), work, sent)

    def tell_all(self, tensor: Tensor, owner: int) -> "Travelling":
        """Send what one process has to all others, in place."""
        if self.size == 1:
            return Travelling(tensor)
        with explained_loss():
            work = dist.broadcast(tensor, owner, async_op=True)
        self.received += (self.size - 1) * tensor.nbytes
        return Travelling(tensor, work)

    def in_order(self, tensors: list[Tensor]) -> list[Tensor]:
        """Bring together what each process has of its micro-batches, in the order of these.

        Args:
            tensors: of the same shapes everywhere.
        """
        if self.size == 1 or not tensors:
            return tensors
        own = torch.stack(tensors)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with explained_loss():
            dist.all_gather(found, own)
        self.received += self.size * (self.size - 1) * own.nbytes
        return [tensor for part in found for tensor in part]

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up integers of all processes."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """Find the largest integers of all processes."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, how: Any) -> Tensor:
        if self.size == 1:
            return tensor
        result = tensor.clone()
        with explained_loss():
            dist.all_reduce(result, how)
        self.received += 2 * (self.size - 1) * result.nbytes
        return result

    def agree(self, *numbers: int) -> list[int]:
        """Find the largest of each number; on the host, nothing waits for a GPU."""
        if self.size == 1:
            return [*numbers]
        found = torch.tensor(numbers, dtype=torch.int64, device=CPU)
        with explained_loss():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def tell(self, value: Any) -> Any:
        """Give all processes what the first one has: anything that can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        with explained_loss():
            dist.broadcast_object_list(values, 0, device=CPU)
        return values[0]

    def collect(self, value: Any) -> list[Any]:
        """Give all processes what each of them has, by rank: anything that can be pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with explained_loss():
            dist.all_gather_object(found, value)
        return found

    def compare(self, values: dict[str, Any], what: str, hint: str = SAME) -> None:
        """Refuse to go on where processes differ.

        Args:
            values: by name.
            what: they are, for the error.
            hint: what to do then.

        Raises:
            ArbError: in all processes, if one of them has others than the first.
        """
        found = self.collect(values)
        for rank, other in enumerate(found):
            names = [n for n in values.keys() | other.keys() if found[0].get(n) != other.get(n)]
            if names:
                listed = ", ".join(f"`{name}`" for name in sorted(names)[:5])
                raise ArbError(
                    f"process {rank} has another {what} than process 0: {listed}",
                    hint=hint,
                )

    def fetch(self, tensor: Tensor | None, like: Tensor, owner: int) -> Tensor | None:
        """Bring a tensor from its owner to the first process.

        Args:
            tensor: what the owner has.
            like: a tensor of its shape and dtype, on any device.
            owner: which process.

        Returns:
            It on the first process, None elsewhere.
        """
        if owner == 0:
            return tensor if self.first else None
        with explained_loss():
            if tensor is not None and self.rank == owner:
                _exchange(dist.P2POp(dist.isend, tensor.contiguous(), 0))
            elif self.first:
                result = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                _exchange(dist.P2POp(dist.irecv, result, owner))
                return result
        return None


class Travelling:
    """A tensor on its way.

    Args:
        tensor: where it arrives.
        work: what `wait` waits for; None if it is there.
        kept: what must not be freed before.
    """

    def __init__(self, tensor: Tensor, work: Any = None, kept: Tensor | None = None) -> None:
        self._tensor, self._work, self._kept = tensor, work, kept

    def wait(self) -> Tensor:
        """Let the current stream wait, or the host on a CPU, and return it."""
        if self._work is not None:
            with explained_loss():
                self._work.wait()
            self._work = self._kept = None
        return self._tensor


def _exchange(*operations: dist.P2POp) -> None:
    """Send and receive between two processes, as a batch: NCCL warns of anything else."""
    for work in dist.batch_isend_irecv([*operations]):
        work.wait()


@contextmanager
def explained_loss() -> Iterator[None]:
    """Turn torch's complaint about a process that is gone into an error that says what to do."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise ArbError(
            f"another process of the run is gone, or does not answer: {reason}",
            hint="continue from the last checkpoint with `--resume`, with any number of processes",
        ) from error


def own_device(place: torch.device) -> torch.device:
    """Find the device of this process: of several, each has a GPU of its own.

    Raises:
        ArbError: there are fewer GPUs than processes.
    """
    here = this_process()
    if place.type != "cuda" or here.size == 1:
        return place
    index, there = here.local_rank, torch.cuda.device_count()
    if index >= there:
        raise ArbError(
            f"process {index} of this machine has no GPU: there are {there}",
            hint=f"start at most {there}, or use `--device cpu`",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def joined(device: torch.device, command: str) -> Iterator[Group]:
    """Join the processes that were started together; a process alone is a group of one.

    Args:
        device: of the tensors that travel.
        command: what this process is about to do, which must be the same in all.

    Raises:
        ArbError: there is no such GPU here, the others do not come, or they do something else.
    """
    place = this_process()
    if place.size == 1:
        yield Group(device=device)
        return
    if place.one_machine:
        os.environ |= INTERFACES
    _connect(place, device, meet(place, command))
    group = Group(place.rank, place.size, device)
    try:
        yield group
    except BaseException:
        group.forget_graphs()
        _abort()
        raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a graph that still runs is not freed
    group.forget_graphs()
    dist.destroy_process_group()


def _connect(place: Place, device: torch.device, store: dist.Store) -> None:
    """Connect this process with all others, which have met.

    Raises:
        ArbError: one of them ended meanwhile, or does not answer.
    """
    on_gpus = device.type == "cuda"

    def connect() -> None:
        if on_gpus:
            torch.cuda.set_device(device)  # of this thread
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            rank=place.rank,
            world_size=place.size,
            store=store,
            device_id=device if on_gpus else None,
        )

    seconds = seconds_to_join()
    try:
        with explained_loss():
            within(seconds, connect)
    except TimeoutError:
        raise ArbError(
            f"another process of the run ended, or does not connect within {seconds} s",
            hint=f"{SAME}, or set `{WAIT}` to wait longer",
        ) from None


def _abort() -> None:
    """End all talk at once: nobody waits for what others may never send.

    It is given some seconds, as what is told is the error that led here, whatever NCCL does.
    """
    if dist.group.WORLD is None:
        return
    thread = Thread(target=dist.group.WORLD.abort, daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
