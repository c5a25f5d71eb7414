"""The updater for several processes: quantised gradients, reduced to the owners of tensors.

Each micro-batch is quantised with the same scales and random bits in whichever process it runs. As
integer sums do not depend on the order, results do not depend on the number of processes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from arbcli.config.training import MAX_INT16_SUMMED, TrainConfig
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.kernels.rows.weighted_rows import TouchedRows, touched_rows, weighted_rows_grad
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.update import quantise_gradient as quantised
from arbcli.kernels.update.hadamard import block_of
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.kernels.update.sum_gradients import sum_gradients
from arbcli.model.layers.table import TableWeight
from arbcli.model.packed import TernaryTensor
from arbcli.model.updater import HELD_BYTES, Updater
from arbcli.training.parallel.group import Group, PendingTensor
from arbcli.training.parallel.owners import (
    ALIGNMENT,
    SUM_FORMATS,
    Bucket,
    Member,
    SumFormat,
    assign_owners,
    broadcast_buffers,
    owner_buffers,
    plan_buckets,
    rounded_up,
)

MAX_QUANTISED = {"int8": 127, "int12": 2047, "int16": 32767}
"""Maximum magnitude of a quantised gradient, by `reduce_dtype`."""
MAX_NARROWED = {"int8": 4, "int12": 4, "int16": MAX_INT16_SUMMED}
"""Maximum number of micro-batches for which gradients are narrowed to keep the width of sums."""
HEADROOM = {"int8": 0, "int12": 0, "int16": 2}
"""Spare bits above the largest element of a row, so that larger later gradients are not clipped."""
MAX_ROW_VALUE = 127
"""Maximum magnitude in the quantised gradient of a table's row."""
WIRE_SEED = 0x5BD1E995
"""XORed with the seed, so that quantisation uses other random bits than updates."""
STEPS_PER_OCTAVE = 16
"""Steps in which an exponent falls by at most one. Maxima of rows vary from step to step, and
clipping is worse than coarse rounding."""
MAX_IN_FLIGHT = 1
"""Number of buckets in flight during the backward."""


def part_limit(reduce_dtype: str, micro_batches: int) -> int:
    """Return the maximum magnitude of a quantised gradient, given the number of micro-batches.

    It does not depend on the number of processes.
    """
    return MAX_QUANTISED[reduce_dtype] // min(micro_batches, MAX_NARROWED[reduce_dtype])


def sums_for(limit: int, local: int, micro_batches: int) -> SumFormat:
    """Choose the smallest integer format in which sums do not overflow.

    Args:
        limit: maximum magnitude of a quantised gradient.
        local: number of micro-batches that a process sums before sending.
        micro_batches: number of micro-batches that an owner sums.

    Raises:
        ValueError: no format is large enough.
    """
    if limit * micro_batches <= SUM_FORMATS[-1].largest:
        return next(sums for sums in SUM_FORMATS if limit * local <= sums.largest)
    raise ValueError(f"the sum of {micro_batches} gradients of up to {limit} overflows int32")


class SharedUpdater(Updater):
    """Steps the weights of a model by the gradients of all processes, as the `sink` of its tensors.

    It sums gradients and passes the sums of owned tensors to `Updater`, as a single micro-batch.

    Args:
        tensors: the packed tensors of the model, always in the same order, after `declare_wire`.
        config: configuration of the run.
        dtype: dtype of the Newton-Schulz products.
        group: the processes of the run.

    Raises:
        ValueError: `config` has no `reduce_dtype`.
    """

    takes_signs = False
    normalises = False
    """Factors of a loss weigh its micro-batch: gradients are summed before they are normalised."""
    counts_rows = True
    """The updater counts the uses of rows, once all processes have sent the touched ones."""

    def __init__(
        self,
        tensors: Iterable[TernaryTensor],
        config: TrainConfig,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        held_bytes = HELD_BYTES if group.size == 1 else 0  # others wait for each tensor
        super().__init__(
            tensors, config.seed, dtype, held_bytes, config.decay, config.weight_average
        )
        if config.reduce_dtype is None:
            raise ValueError("gradients can only be summed in integers, and `reduce_dtype` is None")
        self.group, self.micro_batches = group, config.accum
        """Processes of the run, and number of micro-batches in a step of all of them."""
        self.local = group.local(config.accum)
        self.limit = part_limit(config.reduce_dtype, config.accum)
        self.headroom = HEADROOM[config.reduce_dtype]
        self.sums = sums_for(self.limit, len(self.local), config.accum)
        self._seed = self.controls.seed ^ WIRE_SEED
        self._fall = torch.zeros(1, dtype=torch.int8, device=self.device)
        """1 in steps in which exponents may fall, else 0."""
        self.owners = assign_owners(self.tensors, group.size)
        """Rank of the owner by the `id` of a tensor."""
        self.buckets = plan_buckets(self.tensors, self.owners, group.size, self.sums)
        self._bucket_of = {
            (id(member.tensor), member.matrices.start): (bucket, member)
            for bucket in self.buckets
            for member in bucket.members
        }
        self.received = 0
        """Bytes that all processes together received from others in the last step."""
        self._owner_layout = {
            id(tensor): {n: (part.shape, part.dtype) for n, part in owner_buffers(tensor).items()}
            for tensor in self.tensors
        }
        """Shapes and dtypes of the buffers that are only valid in the owner, by tensor and name."""
        self._reset_step()
        self._free_unowned_buffers()

    def _reset_step(self) -> None:
        """Reset the state of a step."""
        self._messages: dict[int, Tensor] = {}
        self._written: set[Member] = set()
        self._arrived_rows: dict[int, int] = {}
        self._payloads: dict[int, list[Tensor]] = {}
        self._num_rows: dict[int, int] = {}
        self._launched: set[int] = set()
        self._reductions: deque[tuple[Bucket, PendingTensor]] = deque()
        self._broadcasts: deque[tuple[Bucket, list[tuple[int, PendingTensor]]]] = deque()
        self._measured: dict[int, Tensor] | None = None

    def _free_unowned_buffers(self) -> None:
        """Free the buffers that only other owners need."""
        for tensor in self.tensors:
            if self.owners[id(tensor)] != self.group.rank:
                for name, part in owner_buffers(tensor).items():
                    setattr(tensor, name, part[:0].clone())

    def replicated_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state of a model that is replicated in all processes, by name."""
        layout = self.layout(model)
        return {name: part for name, part in model.state_dict().items() if name not in layout}

    def layout(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state that is only valid in owners, by name, as tensors on `meta`."""
        modules = _names(model)
        return {
            f"{modules[key]}.{name}": torch.empty(shape, dtype=dtype, device="meta")
            for key, buffers in self._owner_layout.items()
            for name, (shape, dtype) in buffers.items()
        }

    def gather(self, model: nn.Module) -> dict[str, Tensor]:
        """Gather the state that is only valid in owners to rank 0.

        Args:
            model: the model.

        Returns:
            In rank 0 the tensors of `layout` by name, those of other owners on the CPU; elsewhere
            none.
        """
        modules = _names(model)
        layout, tensors = self.layout(model), {}
        for tensor in self.tensors:
            owner = self.owners[id(tensor)]
            for buffer in self._owner_layout[id(tensor)]:
                name = f"{modules[id(tensor)]}.{buffer}"
                part = self.group.fetch(getattr(tensor, buffer), layout[name], owner)
                if part is not None:
                    # a GPU may not have enough memory for all of them
                    tensors[name] = part.cpu() if owner else part
        return tensors

    # a step

    def begin_step(self, parameters: Tensor, accumulation: int) -> None:
        """Begin a step: see `Updater.begin_step`."""
        ticks = (len(self.local) + 1) // 2
        inner, numbers, fall = parameters.split([len(parameters) - ticks - 1, ticks, 1])
        super().begin_step(inner, 1)
        self._ticks, self._fall = numbers.view(torch.int32), fall.view(torch.int8)[:1]

    def step_parameters(
        self,
        steps: range,
        rates: list[float],
        accumulation: int,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the parameters of consecutive steps: see `Updater.step_parameters`.

        Args:
            steps: numbers of the steps.
            rates: their learning rates.
            accumulation: not used, as all micro-batches are summed first.
            counts: not used, as factors of losses weigh micro-batches.
        """
        numbers = torch.arange(steps.start, steps.stop, device="cpu")[:, None]
        local = torch.arange(self.local.start, self.local.stop, device="cpu")
        size = (len(local) + 1) // 2 + 1
        outer = torch.zeros(len(steps), size, dtype=torch.int64, device="cpu")
        outer.view(torch.int32)[:, : len(local)] = numbers * self.micro_batches + local
        falls = numbers % STEPS_PER_OCTAVE == STEPS_PER_OCTAVE - 1
        outer[:, -1:].view(torch.int8)[:, :1] = falls
        return torch.cat([super().step_parameters(steps, rates, 1), outer], dim=1)

    def begin_micro(self, micro: int) -> None:
        """Prepare for the backward of the process's micro-batch `micro`, from 0."""
        if micro == 0:
            self._reset_step()
            self.group.received = 0
            super().begin_micro(0)
        self.last = micro == len(self.local) - 1
        tick = self._ticks[micro]
        self._keys = stream_keys(self._seed, tick, self.controls.num_matrices, 1)

    @torch.no_grad()
    def __call__(  # type: ignore[override]  # it takes no signs
        self, tensor: TernaryTensor, grad: Tensor, where: "range | TouchedRows | None" = None
    ) -> None:
        """Quantise a gradient, and send the bucket once it is complete.

        Args:
            tensor: one of the updater's tensors.
            grad: (N, K) float32 or bfloat16.
            where: as in `Updater`.
        """
        if isinstance(where, TouchedRows):
            if self._measured is None:
                self._take_rows(tensor, grad, where)
            return
        first = where.start if where is not None else 0
        grad = grad.reshape(-1, grad.shape[-1])
        bucket, member = self._bucket_of[id(tensor), first]
        if self._measured is not None:
            self._measure(member, grad)
            return
        sums, low, fitting = self._local_sums(bucket, member)
        quantised.quantise_gradient(
            grad, tensor.wire_exponent[member.rows, 0], self._key(tensor, first), sums, low,
            fitting, self.limit, block_of(tensor.in_features), member in self._written,
        )  # fmt: skip
        self._written.add(member)
        if self.last:
            arrived = self._arrived_rows.get(id(bucket), 0) + len(grad)
            self._arrived_rows[id(bucket)] = arrived
            if arrived == bucket.rows:
                self._launch(bucket)

    def finish(self) -> None:
        """Finish a step: send remaining buckets, step owned tensors, and receive the others."""
        for bucket in self.buckets:
            if id(bucket) not in self._launched:
                self._launch(bucket)
        while self._reductions:
            self._complete()
        while self._broadcasts:
            self._receive()
        super().finish()
        self._reset_step()
        self.received = self.group.received

    def _largest(self, flag: Tensor) -> Tensor:
        return self.group.largest(flag)

    def _key(self, tensor: TernaryTensor, matrix: int) -> Tensor:
        return self._keys[self.index_of(tensor) + matrix, 0]

    def _local_sums(self, bucket: Bucket, member: Member) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the buffers of a tensor's sums in this process: see `_read_sums`."""
        if id(bucket) not in self._messages:
            options: TensorOptions = {"dtype": torch.uint8, "device": self.device}
            self._messages[id(bucket)] = torch.empty(sum(bucket.up_sizes), **options)
        begin = sum(bucket.up_sizes[: member.owner])
        message = self._messages[id(bucket)][begin : begin + bucket.up_sizes[member.owner]]
        sums, low, fitting = self._read_sums(message[None], member)
        return sums[0], None if low is None else low[0], fitting[0]

    def _read_sums(self, parts: Tensor, member: Member) -> tuple[Tensor, Tensor | None, Tensor]:
        """View the sums of a tensor in messages of P processes, (P, bytes).

        Returns:
            Sums, (P, N, K); their low bits, (P, (N + 1) // 2, K) uint8, or None; and the exponents
            that would have fitted, (P, N) int8.
        """
        rows, columns = member.shape
        size, low_size = self.sums.sizes(rows, columns)
        sums = parts[:, member.up : member.up + size].view(self.sums.dtype)
        begin, low = member.up + rounded_up(size), None
        if self.sums.has_low:
            low = parts[:, begin : begin + low_size].unflatten(1, (-1, columns))
            begin += rounded_up(low_size)
        fitting = parts[:, begin : begin + rows].view(torch.int8)
        return sums.unflatten(1, (rows, columns)), low, fitting

    def _launch(self, bucket: Bucket) -> None:
        """Send the sums of a bucket to the owners, with zeros for missing gradients."""
        self._launched.add(id(bucket))
        if self._is_table(bucket):
            payloads = self._payloads.pop(id(bucket), None)
            if payloads is None:
                return
            sizes = [0] * self.group.size
            sent = torch.cat(payloads)
            sizes[bucket.members[0].owner] = len(sent)
        else:
            if id(bucket) not in self._messages:
                return
            self._zero_missing(bucket)
            sent, sizes = self._messages.pop(id(bucket)), bucket.up_sizes
        self._reductions.append((bucket, self.group.send_to_owners(sent, sizes)))
        while len(self._reductions) > MAX_IN_FLIGHT:
            self._complete()

    def _zero_missing(self, bucket: Bucket) -> None:
        if self._arrived_rows.get(id(bucket), 0) == bucket.rows:
            return
        for member in bucket.members:
            if member not in self._written:
                sums, low, fitting = self._local_sums(bucket, member)
                sums.zero_()
                if low is not None:
                    low.zero_()
                fitting.fill_(quantised.NONE)

    def _complete(self) -> None:
        """Step the owned tensors of a received bucket, and broadcast them."""
        bucket, pending = self._reductions.popleft()
        parts = pending.wait()
        if self._is_table(bucket):
            self._complete_rows(bucket, parts)
            return
        rank = self.group.rank
        for member in bucket.members:
            if member.owner == rank:
                self._step(member, *self._read_sums(parts, member))
        self._broadcast(bucket, bucket.down_sizes, partial(self._copy, bucket, rank, into=True))

    def _broadcast(
        self, bucket: Bucket, sizes: Sequence[int], fill: Callable[[Tensor], None]
    ) -> None:
        """Broadcast the messages of a bucket's owners; this process fills its own one.

        Args:
            bucket: the bucket.
            sizes: size of each owner's message in bytes; 0 sends none.
            fill: writes a message, (size,) uint8.
        """
        if self.group.size == 1:
            return
        broadcasts = []
        for owner, size in enumerate(sizes):
            if size:
                message = torch.empty(size, dtype=torch.uint8, device=self.device)
                if owner == self.group.rank:
                    fill(message)
                broadcasts.append((owner, self.group.broadcast(message, owner)))
        self._broadcasts.append((bucket, broadcasts))
        while len(self._broadcasts) > MAX_IN_FLIGHT:
            self._receive()

    def _step(self, member: Member, sums: Tensor, low: Tensor | None, fitting: Tensor) -> None:
        """Step a tensor by the sums of all processes, and update its exponents."""
        tensor, matrices = member.tensor, member.matrices
        exponent = tensor.wire_exponent[member.rows, 0]
        grad = sum_gradients(sums, low, exponent, fitting, block_of(tensor.in_features), self.dtype)
        if tensor.matrices == 1:
            super().__call__(tensor, grad)
        else:
            super().__call__(tensor, grad.unflatten(0, (len(matrices), -1)), matrices)
        exponent.copy_(next_exponents(exponent, fitting.amax(dim=0), self._fall, self.headroom))

    def _copy(self, bucket: Bucket, owner: int, message: Tensor, *, into: bool) -> None:
        """Copy an owner's state of a bucket into its message, or from it."""
        parts, views = [], []
        for member in bucket.members:
            if member.owner == owner:
                begin = member.down
                for part in member.sent():
                    parts.append(part.view(torch.uint8).view(-1))
                    views.append(message[begin : begin + part.nbytes])
                    begin += rounded_up(part.nbytes)
        torch._foreach_copy_(*((views, parts) if into else (parts, views)))  # in few launches

    def _receive(self) -> None:
        """Apply the broadcasts of a bucket's owners."""
        bucket, broadcasts = self._broadcasts.popleft()
        for owner, pending in broadcasts:
            message = pending.wait()
            if owner == self.group.rank:
                continue
            if self._is_table(bucket):
                self._receive_rows(bucket, message)
            else:
                self._copy(bucket, owner, message, into=False)

    # tables

    def _is_table(self, bucket: Bucket) -> bool:
        return isinstance(bucket.members[0].tensor, TableWeight)

    def _take_rows(self, tensor: TernaryTensor, grad: Tensor, touched: TouchedRows) -> None:
        """Quantise the touched rows of a table, each with its own exponent."""
        bucket, _ = self._bucket_of[id(tensor), 0]
        exponent = quantised.fitting_exponents(grad.abs().amax(dim=1).float(), MAX_ROW_VALUE)
        sums = torch.empty(grad.shape, dtype=torch.int8, device=grad.device)
        dividing = torch.where(exponent == quantised.NOT_FINITE, quantised.NONE, exponent)
        fitting = torch.empty_like(exponent)
        key = self._key(tensor, 0)
        quantised.quantise_gradient(
            grad, dividing, key, sums, None, fitting, MAX_ROW_VALUE, 1, False
        )
        rows = touched.rows.to(torch.int32).view(torch.uint8)
        parts = [rows, exponent.view(torch.uint8), sums.view(torch.uint8).flatten()]
        padding = rows.new_zeros(-sum(map(len, parts)) % ALIGNMENT)
        self._payloads.setdefault(id(bucket), []).append(torch.cat([*parts, padding]))
        self._num_rows[id(bucket)] = len(grad)
        if self.last:
            self._launch(bucket)

    def _complete_rows(self, bucket: Bucket, parts: Tensor) -> None:
        """Sum the touched rows of all micro-batches, step them, and broadcast them.

        Args:
            bucket: the table's bucket.
            parts: (P, bytes), messages of all processes, in the owner.
        """
        (member,) = bucket.members
        tensor, number = member.tensor, self._num_rows[id(bucket)]
        rows = torch.empty(0)
        if member.owner == self.group.rank:
            rows = self._step_rows(tensor, parts.view(self.micro_batches, -1), number)
        limit, sizes = min(number * self.micro_batches, tensor.out_features), [0] * self.group.size
        sizes[member.owner] = self._rows_bytes(tensor, limit)

        def fill(message: Tensor) -> None:
            row_indices, views = self._views_of_rows(tensor, message, limit)
            row_indices.copy_(rows[:, None])
            for part, view in views:
                view.copy_(gather_rows(part, rows))

        self._broadcast(bucket, sizes, fill)

    def _step_rows(self, tensor: TernaryTensor, parts: Tensor, number: int) -> Tensor:
        """Step the rows in messages, (micro-batches, bytes); return their indices."""
        columns, ends = tensor.in_features, (4 * number, 5 * number)
        ids = parts[:, : ends[0]].contiguous().view(torch.int32).flatten().to(torch.int64)
        exponent = parts[:, ends[0] : ends[1]].contiguous().view(torch.int8).flatten()
        sums = parts[:, ends[1] : ends[1] + number * columns].contiguous().view(torch.int8)
        touched = touched_rows(ids, tensor.out_features)
        weights = torch.exp2(exponent.float()).masked_fill_(exponent == quantised.NONE, 0)
        weights.masked_fill_(exponent == quantised.NOT_FINITE, torch.inf)
        tokens = torch.arange(len(ids), device=ids.device)
        values = sums.view(-1, columns).to(self.dtype)  # which has all of an int8
        grad = weighted_rows_grad(values, weights, tokens, touched, torch.float32)
        super().__call__(tensor, grad, touched)
        if isinstance(tensor, TableWeight):
            tensor.count_use(touched.rows)
        return touched.rows

    def _rows_bytes(self, tensor: TernaryTensor, number: int) -> int:
        widths = (part.shape[1] for part in broadcast_buffers(tensor).values())
        return rounded_up(4 * number) + sum(rounded_up(number * width) for width in widths)

    def _views_of_rows(
        self, tensor: TernaryTensor, message: Tensor, number: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return views of a message of rows: their indices, and the rows of each buffer.

        Returns:
            Indices, (R, 1) int32; and each buffer with the view of its rows, (R, width).
        """
        begin, views = rounded_up(4 * number), []
        for part in broadcast_buffers(tensor).values():
            size = number * part.shape[1]
            views.append((part, message[begin : begin + size].view(part.dtype).view(number, -1)))
            begin += rounded_up(size)
        return message[: 4 * number].view(torch.int32)[:, None], views

    def _receive_rows(self, bucket: Bucket, message: Tensor) -> None:
        """Apply the owner's broadcast of a table's touched rows."""
        tensor = bucket.members[0].tensor
        number = min(self._num_rows[id(bucket)] * self.micro_batches, tensor.out_features)
        row_indices, views = self._views_of_rows(tensor, message, number)
        rows = row_indices[:, 0].to(torch.int64)
        for part, view in views:
            scatter_rows_(part, rows, view)
        if isinstance(tensor, TableWeight):
            tensor.count_use(rows)

    # before the first step

    @property
    def needs_measuring(self) -> bool:
        """Whether no exponents are known yet; synchronises with the device."""
        return all(bool((t.wire_exponent == quantised.NONE).all()) for t in self._quantised())

    def _quantised(self) -> list[TernaryTensor]:
        return [tensor for tensor in self.tensors if hasattr(tensor, "wire_exponent")]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Only measure gradients in the block, and set the exponents afterwards."""
        self._reset_step()
        self._measured = {
            id(tensor): torch.full_like(tensor.wire_exponent[:, 0], quantised.NONE)
            for tensor in self._quantised()
        }
        yield
        measured = torch.cat([self._measured[id(tensor)] for tensor in self._quantised()])
        parts = self.group.largest(measured).split([t.out_features for t in self._quantised()])
        for tensor, fitting in zip(self._quantised(), parts, strict=True):
            exponent = tensor.wire_exponent[:, 0]
            exponent.copy_(next_exponents(exponent, fitting, self._fall, self.headroom))
        self._reset_step()

    def _measure(self, member: Member, grad: Tensor) -> None:
        """Update the exponents that would fit a gradient."""
        if self._measured is None:
            raise ValueError("nothing is being measured")
        exponent = self._measured[id(member.tensor)][member.rows]
        unset, fitting = torch.full_like(exponent, quantised.NONE), torch.empty_like(exponent)
        sums = torch.empty(grad.shape, dtype=torch.int16, device=self.device)
        key = torch.zeros((), dtype=torch.int32, device=self.device)
        block = block_of(member.tensor.in_features)
        quantised.quantise_gradient(grad, unset, key, sums, None, fitting, self.limit, block, False)
        exponent.copy_(torch.maximum(exponent, fitting))

    # counters

    def counters(self) -> dict[str, int]:
        """Return the counters of all processes: see `Updater.counters`."""
        counters = super().counters()
        refused = torch.tensor([counters["refused"]], device=self.device)
        return counters | {"refused": int(self.group.sum(refused))}

    def restore(self, counters: dict[str, int]) -> None:
        """Restore the counters of a checkpoint.

        Raises:
            ArbError: the names of the counters differ.
        """
        super().restore(counters if self.group.first else counters | {"refused": 0})

    def bytes_per_weight(self) -> float:
        """Return the mean number of bytes per weight that a process received in the last step."""
        return self.received / self.group.size / self.num_weights


def _names(model: nn.Module) -> dict[int, str]:
    """Return the names of all modules by their ids."""
    return {id(part): name for name, part in model.named_modules()}


def next_exponents(exponent: Tensor, fitting: Tensor, fall: Tensor, headroom: int = 0) -> Tensor:
    """Update exponents to those that would have fitted: up at once, down by at most `fall`.

    Rows without a gradient so far take the maximum of their tensor.

    Args:
        exponent: (N,) int8, present exponents.
        fitting: (N,) int8, fitting exponents of `quantise_gradient`, maximum over micro-batches.
        fall: (1,) int8, 0 or 1.
        headroom: added to the fitting exponents.

    Returns:
        (N,) int8.
    """
    is_known = (fitting != quantised.NONE) & (fitting != quantised.NOT_FINITE)
    fitting = torch.where(is_known, (fitting + headroom).clamp(max=quantised.HIGHEST), fitting)
    down = (exponent.to(torch.int16) - fall).clamp(min=quantised.LOWEST).to(torch.int8)
    moved = torch.where(exponent == quantised.NONE, fitting, torch.maximum(fitting, down))
    moved = torch.where(is_known, moved, exponent)
    return torch.where(moved == quantised.NONE, moved.amax(), moved)
