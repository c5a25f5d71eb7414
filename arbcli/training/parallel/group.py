"""The process group of a run: ranks and collectives.

NCCL transfers tensors on GPUs, and gloo those on CPUs. On a single machine both use the loopback
interface. All reductions are over integers, so that their order does not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from arbcli.base.errors import ArbError, quoted
from arbcli.training.parallel.process import (
    SAME_PROGRAM,
    check_single_process,
    lost_process_errors,
    process_name,
    this_process,
)

CPU = torch.device("cpu")


class Group:
    """The processes of a run; without arguments a group of one.

    All methods are collective, except for properties: all processes call them in the same order.

    Args:
        rank: rank of this process; rank 0 writes files and prints.
        size: number of processes.
        device: device of transferred tensors.
        hosts: name of the machine of each process; empty if there is one.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, device: torch.device = CPU, hosts: Sequence[str] = ()
    ) -> None:
        self.rank, self.size, self.device, self._hosts = rank, size, device, hosts
        self.received = 0
        """Bytes that all processes together have received from others in a step."""
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def register_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register a CUDA graph with collectives, to free it before the group is destroyed.

        NCCL waits for such graphs when it is destroyed or aborted, possibly for ever.
        """
        self._graphs.add(graph)

    def free_graphs(self) -> None:
        """Free the registered graphs."""
        for graph in [*self._graphs]:
            graph.reset()
        self._graphs.clear()

    @property
    def first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    def local(self, number: int) -> range:
        """Return the micro-batches of this process, out of `number`."""
        count = number // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def send_to_owners(self, sent: Tensor, sizes: Sequence[int]) -> "PendingTensor":
        """Send each process its part, and receive this process's part from all (all-to-all).

        Args:
            sent: (sum of `sizes`,) uint8, the concatenated parts.
            sizes: size of each process's part in bytes.

        Returns:
            The pending result, (processes, sizes[rank]) uint8.
        """
        if self.size == 1:
            return PendingTensor(sent[None])
        size = sizes[self.rank]
        result = sent.new_empty(self.size * size)
        with lost_process_errors():
            work = dist.all_to_all_single(result, sent, [size] * self.size, [*sizes], async_op=True)
        self.received += (self.size - 1) * sum(sizes)
        return PendingTensor(result.view(self.size, size), work, sent)

    def broadcast(self, tensor: Tensor, owner: int) -> "PendingTensor":
        """Broadcast a tensor of any shape and dtype from its owner, in place and asynchronously.

        Args:
            tensor: the tensor, of the same shape and dtype in all processes.
            owner: rank of the owner.

        Returns:
            The pending `tensor`.
        """
        if self.size == 1:
            return PendingTensor(tensor)
        with lost_process_errors():
            work = dist.broadcast(tensor, owner, async_op=True)
        self.received += (self.size - 1) * tensor.nbytes
        return PendingTensor(tensor, work)

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Gather one tensor of each micro-batch over all processes, in the order of micro-batches.

        Args:
            tensors: one for each micro-batch of this process, all of the same shape.
        """
        if self.size == 1 or not tensors:
            return tensors
        stacked = torch.stack(tensors)
        gathered = [torch.empty_like(stacked) for _ in range(self.size)]
        with lost_process_errors():
            dist.all_gather(gathered, stacked)
        self.received += self.size * (self.size - 1) * stacked.nbytes
        return [tensor for part in gathered for tensor in part]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum an integer tensor, of equal shape in all processes, over them."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of an integer tensor, of equal shape in all processes."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return tensor
        result = tensor.clone()
        with lost_process_errors():
            dist.all_reduce(result, op)
        self.received += 2 * (self.size - 1) * result.nbytes
        return result

    def agree(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all processes, without a GPU."""
        if self.size == 1:
            return [*numbers]
        maxima = torch.tensor(numbers, dtype=torch.int64, device=CPU)
        with lost_process_errors():
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast a picklable object from rank 0."""
        if self.size == 1:
            return value
        values = [value]
        with lost_process_errors():
            dist.broadcast_object_list(values, 0, device=CPU)
        return values[0]

    def call_in_first(self, function: Callable[[], Any]) -> Any:
        """Call a function in rank 0; return its result, or raise its `ArbError`, in all processes.

        The result must be picklable.
        """
        result = None
        try:
            result = function() if self.first else None
        except ArbError as error:
            result = error
        result = self.broadcast_object(result)
        if isinstance(result, ArbError):
            raise result
        return result

    def collect(self, value: Any) -> list[Any]:
        """Gather picklable objects of all processes, in the order of ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with lost_process_errors():
            dist.all_gather_object(gathered, value)
        return gathered

    def compare(self, values: dict[str, Any], kind: str, hint: str = SAME_PROGRAM) -> None:
        """Check that values are equal in all processes.

        Args:
            values: values by name.
            kind: kind of the values, for the error.
            hint: hint of the error.

        Raises:
            ArbError: in all processes, if one differs from rank 0.
        """
        gathered = self.collect(values)
        for rank, other in enumerate(gathered):
            names = [n for n in values.keys() | other.keys() if gathered[0].get(n) != other.get(n)]
            if names:
                name, listed = process_name(rank, self._hosts), quoted(sorted(names)[:5])
                raise ArbError(f"{name} has another {kind} than process 0: {listed}", hint)

    def fetch(self, tensor: Tensor | None, like: Tensor, owner: int) -> Tensor | None:
        """Send a tensor from its owner to rank 0.

        Args:
            tensor: the tensor in the owner.
            like: a tensor of the same shape and dtype, on any device.
            owner: rank of the owner.

        Returns:
            The tensor in rank 0, None elsewhere.
        """
        if owner == 0:
            return tensor if self.first else None
        with lost_process_errors():
            if tensor is not None and self.rank == owner:
                _exchange(dist.P2POp(dist.isend, tensor.contiguous(), 0))
            elif self.first:
                result = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                _exchange(dist.P2POp(dist.irecv, result, owner))
                return result
        return None


class PendingTensor:
    """The pending result of an asynchronous collective.

    Args:
        tensor: the result.
        work: handle of the collective; None if it is complete.
        keep_alive: tensor to keep alive until then.
    """

    def __init__(self, tensor: Tensor, work: Any = None, keep_alive: Tensor | None = None) -> None:
        self._tensor, self._work, self._keep_alive = tensor, work, keep_alive

    def wait(self) -> Tensor:
        """Wait for the result, on the current stream or on the host, and return it."""
        if self._work is not None:
            with lost_process_errors():
                self._work.wait()
            self._work = self._keep_alive = None
        return self._tensor


def _exchange(*operations: dist.P2POp) -> None:
    """Run point-to-point operations as a batch, as NCCL warns about unbatched ones."""
    for work in dist.batch_isend_irecv([*operations]):
        work.wait()


def own_device(device: torch.device) -> torch.device:
    """Return the device of this process; with several processes, each has its own GPU.

    Raises:
        ArbError: there are fewer GPUs than processes.
    """
    process = this_process()
    if device.type != "cuda" or process.size == 1:
        return device
    index, available = process.local_rank, torch.cuda.device_count()
    if index >= available:
        raise ArbError(
            f"process {index} of this machine has no GPU: there are {available}",
            f"start at most {available}, use `--device cpu`, or set `LOCAL_RANK=0` where every task"
            " sees only its own GPU",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def joined(device: torch.device, command: str) -> Iterator[Group]:
    """Join the process group within the block; a single process is a group of one.

    Args:
        device: device of transferred tensors.
        command: name of the command, which must be the same in all processes.

    Raises:
        ArbError: processes are missing, or run another command or version.
    """
    process = this_process()
    if process.size == 1:
        check_single_process()
        yield Group(device=device)
        return
    from arbcli.training.parallel.rendezvous import abort, connect

    hosts, heartbeat = connect(process, device, command)
    group = Group(process.rank, process.size, device, hosts)
    try:
        yield group
    except BaseException as error:
        explained = None if heartbeat is None else heartbeat.leave(error)
        group.free_graphs()
        abort()
        if explained is not None:
            raise explained from error
        raise
    if heartbeat is not None:
        heartbeat.stop()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # running graphs cannot be freed
    group.free_graphs()
    dist.destroy_process_group()
