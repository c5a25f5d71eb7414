"""Packed tensors in modules of other libraries, and how their gradients reach the optimizer.

A packed tensor has no float parameter. In its place `model.parameters()` lists its `anchor`, an
empty tensor: `anchor.requires_grad` says whether the weights are trained, `anchor.dtype` is the
dtype that they are decoded to, and `anchor.grad` stays None.

All uses of a tensor in a graph take the same `token`, which depends on the anchor. Autograd runs
the backward of the token once, after those of all uses. It computes the gradient from the inputs
and output gradients that these have collected, and passes it to the optimizer, which consumes it.
Forward passes without a backward, recomputed ones, and tied weights therefore need no bookkeeping.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.weak import TensorWeakRef

from arbcli.base.errors import ArbError
from arbcli.config.layer_spec import LayerSpec
from arbcli.families.experts.weight import ExpertWeight
from arbcli.interop.rounding import put
from arbcli.kernels.matmul.ternary_matmul import ternary_matmul, ternary_matmul_grad_x
from arbcli.kernels.rows.ternary_embedding import embedding_rows
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.model.layers.embedding import EmbeddingWeight
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.symbols import ManyEmbeddingsWeight, Scored, SymbolWeight
from arbcli.model.layers.vector import ReadWeight, VectorWeight
from arbcli.model.packed import GradientSink, StreamedTensor

READ_AT_ONCE = 1 << 22
"""Number of weights that are in float32 at a time while they are rounded."""
DTYPES = torch.bfloat16, torch.float32
"""Dtypes that weights are decoded to."""


class Anchor(nn.Parameter):
    """The empty parameter that stands for a packed tensor."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Keep the class in pickles; that of torch makes a `Parameter` of every one."""
        return Anchor, (self.data, self.requires_grad)


class Anchored(StreamedTensor):
    """A packed tensor of a module of another library.

    Args:
        args, kwargs: arguments of the packed tensor.
        dtype: dtype that it is decoded to, bfloat16 or float32.
    """

    anchor: Anchor
    shape: tuple[int, ...]
    """Shape of the float parameter that it replaces."""
    transposed = False
    """Whether the float parameter is the transpose of the packed matrix."""
    _token: TensorWeakRef | None = None

    def __init__(self, *args: Any, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.anchor = Anchor(torch.empty(0, dtype=dtype))
        self.shape = self.out_features, self.in_features
        self._uses: list[tuple[Any, Tensor]] = []
        self._backward = -1
        """Number of the backward that the collected uses belong to."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the optimizer, and uses of this process, out of copies and pickles."""
        return self.__dict__ | {"sink": None, "_token": None, "_uses": [], "_backward": -1}

    def _apply(self, function: Any, recurse: bool = True) -> "Anchored":
        """Move the tensor, or change the dtype that it is decoded to."""
        check_dtype(function(self.anchor.detach()).dtype)
        super()._apply(function, recurse)
        return self

    def _replicate_for_data_parallel(self) -> Any:
        raise ArbError(
            "integer weights cannot be replicated on several GPUs of a process",
            "set `CUDA_VISIBLE_DEVICES` to one GPU",
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}anchor"]
        getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})["rule"] = self.rule.name

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        metadata, _, missing, _, errors = args
        missing[:] = [name for name in missing if name != f"{prefix}anchor"]
        if (rule := metadata.get("rule", self.rule.name)) != self.rule.name:
            errors.append(f"`{prefix[:-1]}` was saved with `rule={rule!r}`, not {self.rule.name!r}")

    @property
    def trained(self) -> bool:
        """Whether a graph that is recorded now trains the tensor."""
        return torch.is_grad_enabled() and self.anchor.requires_grad

    def token(self) -> Tensor:
        """Return the empty tensor, (0,), that all uses of a graph depend on; they must keep it."""
        if not self.trained:
            return self.anchor.detach()
        token = None if self._token is None else self._token()
        if token is None:
            token = _Token.apply(self.anchor, self)
            self._token = TensorWeakRef(token)
        return token

    def add_use(self, source: Any, grad_y: Tensor, version: tuple[int, ...]) -> None:
        """Collect the input and output gradient of a use, in its backward.

        Args:
            source: input of the use, as `emit_gradient_of_uses` of the tensor expects it.
            grad_y: gradient of its result, such as (M, N) of a product.
            version: `version` in the forward.

        Raises:
            ArbError: the weights have changed since the forward.
        """
        if self.version != version:
            raise ArbError(
                "integer weights have changed between a forward and its backward",
                "run the backward of each forward before the next one, and use"
                " `use_reentrant=False` for activation checkpointing",
            )
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # an earlier one was interrupted
            self._uses, self._backward = [], backward
        self._uses.append((source, grad_y))

    def emit(self) -> None:
        """Pass the gradient of all uses to the optimizer, in the backward of the token."""
        uses, self._uses, self._token = self._uses, [], None
        if not uses:
            return
        if self.sink is None:
            raise ArbError(
                "integer weights have a gradient, and no optimizer that consumes it",
                "build one with `arbcli.nn.IntegerOptimizer(model)`, or freeze the weights"
                " with `model.requires_grad_(False)`",
            )
        self.emit_gradient_of_uses(self.sink, uses)

    def dense_use(self, grad: Tensor) -> tuple[Any, Tensor]:
        """Express a gradient of the matrix itself, (N, K), as a use: w @ 1."""
        return torch.eye(self.in_features, dtype=grad.dtype, device=grad.device), grad.T

    def as_matrix(self, values: Tensor) -> Tensor:
        """Reshape values of the float parameter to (N, K)."""
        return values.T if self.transposed else values.reshape(self.out_features, self.in_features)

    def decoded(self) -> Tensor:
        """Decode to the shape and dtype of the float parameter; not differentiable."""
        matrix = self.weight(self.anchor.dtype)
        return matrix.T if self.transposed else matrix.view(self.shape)

    def use(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        propagate: Callable[..., Tensor] | None,
        express: Callable[..., tuple[Any, Tensor]],
        *tensors: Tensor,
    ) -> Tensor:
        """Compute a result from tensors; the first of these and the weights have gradients.

        Args:
            run: computes the result, and further tensors that the backward needs.
            propagate: computes the gradient of the first tensor from that of the result, and from
                `tensors` and the further ones; None if the first tensor has no gradient.
            express: expresses the gradient of the result as a use, from the same: see `add_use`.
            tensors: arguments of `run`, of any shapes.

        Returns:
            The first result of `run`.

        Raises:
            ArbError: the program is traced, exported or transformed, and kernels are in no trace.
        """
        transforms = torch._C._functorch.peek_interpreter_stack()
        if torch.jit.is_tracing() or torch.compiler.is_exporting() or transforms is not None:
            raise ArbError(
                "integer weights cannot be traced, exported or transformed by `torch.func`",
                "`arbcli.export_float(model, folder)` writes floats, and"
                " `arbcli.nn.float_state_dict(model)` returns them",
            )
        return _Use.apply(self, self.token(), run, propagate, express, *tensors)

    @torch.compiler.disable
    def read(self) -> Tensor:
        """Decode to the shape and dtype of the float parameter; differentiable."""
        return self.use(
            lambda: (self.decoded(),),
            None,
            lambda grad: self.dense_use(self.as_matrix(grad).contiguous()),
        )

    @torch.no_grad()
    def round(self, values: Tensor, own_grid: bool = False) -> None:
        """Set the weights to those closest to float values, with zero training state.

        Args:
            values: of the shape of the float parameter, finite; on any device.
            own_grid: whether the values may have been decoded by this package.
        """
        device = self.trits.device
        self.to("cpu")
        for buffer in self.buffers():
            buffer.zero_()
        matrix = self.as_matrix(values)
        for part in row_chunks(matrix, READ_AT_ONCE):
            put(self, part, matrix[part].to("cpu", torch.float32).contiguous(), own_grid)
        if self.direction is not None:
            self.direction.start(self.state)
        self.to(device)


def check_dtype(dtype: torch.dtype) -> None:
    """Check that weights can be decoded to a dtype.

    Raises:
        ArbError: they cannot.
    """
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ArbError(
            f"integer weights compute in bfloat16 or float32, and not in {name}",
            "use `dtype=torch.bfloat16`, `model.bfloat16()` or `bf16=True`",
        )


class _Token(Function):
    """An empty tensor; its backward emits the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Anchored) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return anchor.new_empty(0)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None]:
        ctx.weight.emit()
        return None, None


_FIRST = 5
"""Place of the first tensor among the arguments of `_Use`."""


class _Use(Function):
    """A use of a packed tensor: see `Anchored.use`."""

    @staticmethod
    def forward(
        ctx: Any, weight: Anchored, token: Tensor, run: Any, propagate: Any, express: Any,
        *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.weight, ctx.token = weight, token
        ctx.version = weight.version if token.requires_grad else ()
        ctx.propagate, ctx.express = propagate, express
        y, *saved = run(*tensors)
        ctx.save_for_backward(*tensors, *saved)
        return y

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArbError(
                "integer weights have no second derivatives",
                "compute the gradient without `create_graph=True`",
            )
        grad_y, saved = grad_y.contiguous(), ctx.saved_tensors
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if any(ctx.needs_input_grad[_FIRST:]):
            grads[_FIRST] = ctx.propagate(grad_y, *saved)
        if ctx.token.requires_grad:
            ctx.weight.add_use(*ctx.express(grad_y, *saved), ctx.version)
        return tuple(grads)


def _autocast(x: Tensor) -> Tensor:
    """Convert an input of a product to the dtype of autocast, and check its dtype."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    check_dtype(x.dtype)
    return x


def _product(
    x: Tensor, weight: Anchored, run: Callable, propagate: Callable, express: Callable
) -> Tensor:
    """Multiply (..., K) to (..., N) in the dtype of autocast; see `Anchored.use` for functions."""
    x = _autocast(x)
    with torch.autocast(x.device.type, enabled=False):
        y = weight.use(run, propagate, express, x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], y.shape[-1])


class Matrix(Anchored, LinearWeight):
    """The weight of a linear layer."""

    @torch.compiler.disable
    def product(self, x: Tensor) -> Tensor:
        """Multiply (..., K) to (..., N); differentiable.

        Raises:
            ArbError: x is neither bfloat16 nor float32.
        """
        return _product(
            x,
            self,
            lambda rows: (self.multiply(rows, None),),
            lambda grad_y, _: self.propagate(grad_y),
            lambda grad_y, rows: (rows, grad_y),
        )


class FusedMatrix(Matrix):
    """The weights of several linear layers with the same input, which are stepped as one matrix.

    Args:
        heights: number of outputs of each layer.
        args, kwargs: as of `Matrix`, without the number of outputs.
    """

    def __init__(self, heights: Sequence[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(sum(heights), *args, **kwargs)
        ends = accumulate(heights)
        self.parts = [slice(end - height, end) for height, end in zip(heights, ends, strict=True)]

    def emit_gradient_of_uses(self, sink: GradientSink, uses: list[tuple[Any, Tensor]]) -> None:
        """Compute the gradient, (N of all layers, K), and pass it to the sink.

        Args:
            sink: consumer of the gradient.
            uses: pairs of an input, (M, K) activations with the number of the layer, and the output
                gradient, (M, N of the layer).
        """
        groups: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.parts]
        for (x, part), grad_y in uses:
            groups[part].append((x, grad_y))
        inputs = {(x.data_ptr(), x.shape, x.stride()) for group in groups for x, _ in group}
        if len(inputs) == 1 and all(len(group) == 1 for group in groups):
            x = groups[0][0][0]
            self.emit_gradient(sink, (x,), torch.cat([group[0][1] for group in groups], dim=1))
            return
        grads = [
            sum((grad_y.T @ x for x, grad_y in group[1:]), group[0][1].T @ group[0][0])
            if group
            else self.decoded()[rows].zero_()
            for group, rows in zip(groups, self.parts, strict=True)
        ]
        sink(self, torch.cat(grads))


class MatrixRows:
    """The rows of a `FusedMatrix` that are the weight of one layer.

    Args:
        matrix: the matrix.
        part: number of the layer.
    """

    def __init__(self, matrix: FusedMatrix, part: int) -> None:
        self.matrix, self.part = matrix, part

    @property
    def anchor(self) -> Anchor:
        """The anchor of the matrix."""
        return self.matrix.anchor

    @torch.compiler.disable
    def product(self, x: Tensor) -> Tensor:
        """Multiply (..., K): see `Matrix.product`."""
        packed = self.matrix.packed.rows(self.matrix.parts[self.part])
        return _product(
            x,
            self.matrix,
            lambda rows: (ternary_matmul(rows, packed),),
            lambda grad_y, _: ternary_matmul_grad_x(grad_y, packed),
            lambda grad_y, rows: ((rows, self.part), grad_y),
        )

    def decoded(self) -> Tensor:
        """Decode to (N, K) of the dtype of the float parameter; not differentiable."""
        return self.matrix.decoded()[self.matrix.parts[self.part]]

    def read(self) -> Tensor:
        """Decode to (N, K) of the dtype of the float parameter; differentiable."""
        columns = self.matrix.in_features
        unit = torch.eye(columns, dtype=self.anchor.dtype, device=self.anchor.device)
        return self.product(unit).T


class Symbols(Anchored, SymbolWeight):
    """The weight of a head for many symbols, or one that an embedding shares."""

    product = Matrix.product

    @torch.compiler.disable
    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each row in nats; differentiable.

        Args:
            x: (M, K) bfloat16 or float32.
            targets: (M,) int64 in 0..N-1.

        Returns:
            (M,) float32.
        """
        check_dtype(x.dtype)
        return self.use(
            lambda x, targets: self.score(x, targets)[:2],
            lambda scale, x, targets, total: self.propagate_losses(
                Scored(x, targets, total, []), scale
            ),
            lambda scale, x, targets, total: (Scored(x, targets, total, []), scale),
            x,
            targets,
        )


class Rows(Anchored, EmbeddingWeight):
    """The weight of an embedding."""

    def dense_use(self, grad: Tensor) -> tuple[Any, Tensor]:
        """Express a gradient of the matrix, (V, D), as that of all rows, with (V,) int64 ids."""
        return torch.arange(self.out_features, device=grad.device), grad


class ManyRows(Anchored, ManyEmbeddingsWeight):
    """The weight of an embedding with many rows."""

    dense_use = Rows.dense_use


class Numbers(Anchored, VectorWeight):
    """Numbers that have a scale each, such as gains, biases and taps."""

    def __init__(self, count: int, spec: LayerSpec, *, area: str, dtype: torch.dtype) -> None:
        super().__init__([0.0] * count, spec, area=area, dtype=dtype)
        self.values = ()

    def dense_use(self, grad: Tensor) -> tuple[Any, Tensor]:
        """Return the gradient, (N, K), with None as the input."""
        return None, grad


class Stack(Anchored, ReadWeight):
    """Matrices that a module reads, stacked by rows and stepped separately."""

    always_has_gradients = True
    dense_use = Numbers.dense_use

    def emit_gradient(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Sum the gradients of all uses, and pass the sum to the sink.

        Args:
            sink: consumer of the gradient, (matrices, rows, K) with their range; (N, K) if there is
                one matrix.
            sources: None for each use.
            grad_y: gradients of all uses, concatenated: (uses * N, K).
        """
        if self.matrices == 1:
            super().emit_gradient(sink, sources, grad_y)
            return
        shape = len(sources), self.matrices, self.matrix_rows, self.in_features
        sink(self, grad_y.reshape(shape).sum(dim=0), range(self.matrices))


class ExpertStack(Anchored, ExpertWeight):
    """The matrices of all experts of a layer."""

    def multiply_slots(self, x: Tensor, bounds: Tensor) -> Tensor:
        """Multiply slots, (S, K), that are sorted by expert: see `ExpertWeight.multiply`.

        Raises:
            ArbError: x is neither bfloat16 nor float32.
        """
        return self.use(
            lambda x, bounds: (self.product(x, bounds),),
            lambda grad_y, _, bounds: self.product(grad_y, bounds, transposed=True),
            lambda grad_y, *slots: (slots, grad_y),
            _autocast(x),
            bounds,
        )

    def dense_use(self, grad: Tensor) -> tuple[Any, Tensor]:
        """Express a gradient of the matrices, (E N, K), as slots that are unit vectors.

        Returns:
            Slots, (E K, K), with their bounds, (E + 1,) int64; and their gradients, (E K, N).
        """
        unit = torch.eye(self.in_features, dtype=grad.dtype, device=grad.device)
        bounds = torch.arange(self.matrices + 1, device=grad.device) * self.in_features
        grads = grad.view(self.matrices, self.matrix_rows, -1).transpose(1, 2)
        return (unit.repeat(self.matrices, 1), bounds), grads.reshape(-1, self.matrix_rows)


@torch.compiler.disable
def look_up(weight: Anchored, ids: Tensor, padding: int | None) -> Tensor:
    """Look up rows of an embedding's weight; differentiable.

    Args:
        weight: of V rows and D columns.
        ids: (...) integers.
        padding: row that is not trained; None for none.

    Returns:
        (..., D) of the dtype that the weight is decoded to.

    Raises:
        ArbError: `ids` are floats.
    """
    if ids.is_floating_point():
        raise ArbError(f"ids are {ids.dtype}", "embeddings look up integers")
    flat = ids.reshape(-1).to(torch.int64)

    def express(grad_y: Tensor, ids: Tensor) -> tuple[Any, Tensor]:
        if padding is not None:
            grad_y = grad_y.masked_fill((ids == padding)[:, None], 0)
        return ids, grad_y

    y = weight.use(
        lambda ids: (embedding_rows(ids, weight.packed, weight.anchor.dtype),), None, express, flat
    )
    return y.view(*ids.shape, weight.in_features)
