"""The linear layer with a packed matrix, fused with the norm before it.

A use of a weight is registered in the forward (`await_backward`). The backward of the last use
computes the gradient from the inputs and output gradients of all uses (`collect`), and passes it to
the weight's `sink`, the updater.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.runtime.backend import backend_of
from arbcli.model.initial import inner_lr_factor, projection_std
from arbcli.model.layers import products
from arbcli.model.layers.compiled import anchor, operator
from arbcli.model.layers.norm import NORM_EPS, PackedGates, TernaryRMSNorm
from arbcli.model.packed import DecodingLayer, GradientSink, StreamedTensor, recomputing

if TYPE_CHECKING:
    from arbcli.kernels.attention.attend_parts import AttentionParts


class DecodedWith(NamedTuple):
    """Weights that are decoded in one launch: see `decode_in_groups`."""

    forward_weights: "tuple[LinearWeight, ...]"
    """Weights that a forward decodes too, which it needs next."""
    backward_weights: "tuple[LinearWeight, ...]"
    """Weights that a backward decodes too, which it needs next."""
    kept_for_backward: bool
    """Whether a forward keeps the decoded weight for the backward, which begins with it."""


class LinearWeight(StreamedTensor, products.LowPrecision):
    """The weight of a `TernaryLinear`."""

    number_format = "bf16"
    """Format of products of many rows: `bf16`, or of `FORMATS`."""
    low_precision = True
    """Whether FP8 and NVFP4 are allowed for this weight."""
    is_last = False
    """Whether its product is the last of a block, whose result no backward reads."""
    group: DecodedWith | None = None
    """Weights that are decoded with it; None if it is decoded alone."""
    _kept: Tensor | None = None
    _keeps = False
    quantised_grad: tuple[Tensor, Tensor, Tensor] | None = None
    """Gradient of a product, and its `quantise_rows`, for the gradient of the weight."""
    _ready: tuple[tuple[int, ...], Tensor] | None = None
    """Version of the weight, and a tensor that was computed from it for its next use."""

    @property
    def storage(self) -> str:
        """`int8` if products read the remainder too, otherwise `trits`."""
        return "int8" if self.rule.reads_all else "trits"

    def multiply_in(self, number_format: str) -> bool:
        """Multiply in a format if the shapes fit: see `LowPrecision`."""
        chosen = self.low_precision and products.fits_low_precision(
            self.out_features, self.in_features
        )
        self.number_format = number_format if chosen else "bf16"
        return chosen

    def product_for(self, rows: Tensor) -> products.Product:
        """Choose the product of activations (M, K), or of a gradient (M, N)."""
        return products.choose_product(
            self.storage, len(rows) > products.FEW_ROWS, rows.dtype, backend_of(rows),
            self.number_format, self.group is not None, self._keeps,
        )  # fmt: skip

    def multiply(self, x: Tensor, norm: TernaryRMSNorm | None) -> Tensor:
        """Compute norm(x) @ w.T for (M, K) activations; undefined where nothing reads it."""
        if self.is_last and recomputing():
            return x.new_empty(len(x), self.out_features)
        return self.product_for(x).product(self, norm(x) if norm else x)

    def propagate(self, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w, the gradient of x, from the (M, N) gradient of a product."""
        return self.product_for(grad_y).propagate(self, grad_y)

    def make_ready(self, tensor: Tensor) -> None:
        """Save a tensor computed from the weight, such as the decoded (N, K), for its next use."""
        self._ready = self.version, tensor

    def take_ready(self) -> Tensor | None:
        """Return the tensor that `make_ready` saved, once; None if the weight has changed since."""
        ready, self._ready = self._ready, None
        return ready[1] if ready and ready[0] == self.version else None

    @contextmanager
    def decoded_once(self) -> Iterator[None]:
        """Keep the decoded weight within the block; it must not change meanwhile.

        The `triton` backend keeps none.
        """
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None

    def kept(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded weight, (N, K), and keep it until the end of `decoded_once`."""
        if self._kept is None or self._kept.dtype != dtype:
            self._kept = self.weight(dtype)
        return self._kept

    def emit_gradient(
        self, sink: GradientSink, sources: tuple[Tensor, ...], grad_y: Tensor
    ) -> None:
        """Compute the gradient, or only its signs if the rule reads no more, for the sink.

        Args:
            sink: consumer of the gradient, (N, K), or of a `SignGradient`.
            sources: (M, K), input of each use.
            grad_y: output gradients of all uses, concatenated: (M of all uses, N).
        """
        if self.rule.reads_signs and getattr(sink, "takes_signs", False):
            from arbcli.kernels.update.sign_gradient import sign_gradient

            source = sources[0] if len(sources) == 1 else torch.cat(sources)
            sink(self, sign_gradient(grad_y, source, self.packed))
        else:
            super().emit_gradient(sink, sources, grad_y)

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Compute grad_y.T @ source, (N, K), with float32 accumulation.

        Args:
            source: (M, K).
            grad_y: (M, N).

        Returns:
            The gradient, rounded once to the dtype of `source`.
        """
        return self.product_for(grad_y).gradient(self, source, grad_y)

    def product_backward(
        self,
        grad_y: Tensor,
        x: Tensor | PackedGates,
        norm: TernaryRMSNorm | None,
        needs_grad_x: bool,
        *,
        other_grad: Tensor | None = None,
        overwrite: bool = False,
    ) -> Tensor | None:
        """Run the backward of `multiply`: collect the weight's gradient, and return that of x.

        Args:
            grad_y: (M, N).
            x: (M, K), or the input of `norm`, packed or not.
            norm: as in `multiply`.
            needs_grad_x: whether the gradient of x is needed; else the result may be None.
            other_grad: another gradient of x, of its shape, which `norm` adds.
            overwrite: whether the gradient of a gate may overwrite x.

        Returns:
            The gradient of x, of its shape; for packed gates (M, 2 K).
        """
        grad_x: Tensor | None = None
        source: Any = x
        if needs_grad_x or (norm and norm.trained):
            grad_x = self.propagate(grad_y)
            if norm:
                grad_x, source = norm.backward(grad_x, source, other_grad, overwrite)
        elif norm:
            source = norm(source)
        self.collect(source, grad_y)
        self.quantised_grad = None
        return grad_x


class _Linear(Function):
    """y = norm(x) @ w.T. The gradient of w goes to the weight's sink.

    Gate and up of an MLP may be packed for the backward: see `TernaryRMSNorm.packs`.

    `anchor` is an empty tensor that requires a gradient, so that the backward also runs if x does
    not require one; `trained` says whether the backward will run. Callers of `_linear` omit both,
    and `operator` adds them.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: LinearWeight,
        norm: TernaryRMSNorm | None,
        consumes: bool,
        anchor: Tensor,
        trained: bool,
    ) -> Tensor:
        if trained:
            weight.await_backward()
            if norm:
                norm.await_backward()
        return weight.multiply(x, norm)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.weight, ctx.norm, ctx.consumes, _, trained = inputs
        ctx.packs = trained and ctx.consumes and ctx.norm is not None and ctx.norm.packs
        if ctx.packs:
            from arbcli.kernels.norm.pack_gates import pack_gates

            ctx.save_for_backward(*pack_gates(x))
        else:
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x = PackedGates(*ctx.saved_tensors) if ctx.packs else ctx.saved_tensors[0].detach()
        grad_x = ctx.weight.product_backward(
            grad_y, x, ctx.norm, ctx.needs_input_grad[0], overwrite=ctx.consumes
        )
        return grad_x, None, None, None, None, None


_linear = operator(_Linear, lambda x, trits, *_: x.new_empty(len(x), len(trits)))


class _SumLinear(Function):
    """total = x + added, y = norm(total) @ w.T; otherwise like `_Linear`.

    `total` is also an output, the residual stream, so its gradient is added.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor, anchor: Tensor, weight: LinearWeight,
        norm: TernaryRMSNorm,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.weight, ctx.norm = weight, norm
        ctx.set_materialize_grads(False)
        total, normal = norm.add_and_norm(x, added)
        ctx.save_for_backward(total)
        return weight.product_for(x).product(weight, normal), total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        (total,) = ctx.saved_tensors
        grad = ctx.weight.product_backward(grad_y, total, ctx.norm, True, other_grad=grad_total)
        return grad, grad, None, None, None


class TernaryLinear(DecodingLayer):
    """y = x @ w.T with packed weights, ternary or of all digits: see `TernaryTensor`.

    `forward` is for training and for many rows, `fused` for few rows in generation.

    Args:
        out_features: N.
        in_features: K.
        spec: storage settings and width of the stage.
        area: parameter group of the weights.
        std: initial standard deviation of the weights; None is `projection_std`.
        spread: initial standard deviation of z relative to the rule's; 0 initialises to zero.
        lr_factor: factor of the learning rate; None is `inner_lr_factor`.
        low_precision: whether `--compute fp8` and `nvfp4` apply to the layer.
    """

    combines_parts = True
    """Whether `fused` may take the partial results of split-KV attention."""
    _prepacked: Any = None
    _decoded: Tensor | None = None

    def __init__(
        self,
        out_features: int,
        in_features: int,
        spec: LayerSpec,
        *,
        area: str,
        std: float | None = None,
        spread: float = 1.0,
        lr_factor: float | None = None,
        low_precision: bool = True,
    ) -> None:
        super().__init__()
        self.weight = LinearWeight(
            out_features,
            in_features,
            spec,
            area=area,
            std=projection_std(in_features) if std is None else std,
            spread=spread,
            lr_factor=inner_lr_factor(spec, spec.direction) if lr_factor is None else lr_factor,
        )
        self.weight.low_precision = low_precision
        self.weight.fixed_scales = spec.bitnet

    def forward(
        self,
        x: Tensor,
        norm: TernaryRMSNorm | None = None,
        added: Tensor | None = None,
        *,
        consumes: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Multiply (..., K) activations to (..., N) of the same dtype.

        Args:
            x: activations.
            norm: norm or gate applied to x first; its backward is part of the product's, so that
                only x is saved.
            added: tensor added to x before that; the sum is then returned too.
            consumes: whether the caller no longer needs x, so that the backward of a gate may
                overwrite it.
        """
        compiled = torch.compiler.is_compiling()
        rows = x.reshape(-1, x.shape[-1])
        if added is None:
            y = _linear(rows, self.weight, norm, consumes and not compiled)
            return y.view(*x.shape[:-1], -1)
        if norm is None or compiled:
            x = x + added
            return self(x, norm), x
        if torch.is_grad_enabled():
            self.weight.await_backward()
            norm.await_backward()
        parts = rows, added.reshape(rows.shape), anchor(x)
        y, total = _SumLinear.apply(*parts, self.weight, norm)
        return y.view(*x.shape[:-1], -1), total.view(x.shape)

    @property
    def takes_parts(self) -> bool:
        """Whether `fused` takes partial attention results: of one row, for ternary weights."""
        return self.combines_parts and products.fits_row_matmul(
            self.weight.storage, self.weight.in_features
        )

    def fused_product_for(self, x: "Tensor | AttentionParts") -> products.FusedProduct:
        """Choose the product of `fused` for x, (..., K), or for partial attention results."""
        weight, rows, texts = self.weight, 1, 1
        if isinstance(x, Tensor):
            rows, texts = x.numel() // x.shape[-1], len(x)
        backend = backend_of(x if isinstance(x, Tensor) else x.values)
        return products.choose_fused(weight.storage, weight.in_features, rows, texts == 1, backend)

    @torch.no_grad()
    def fused(
        self,
        x: "Tensor | AttentionParts",
        *,
        normalise: bool,
        gated: bool = False,
        added: Tensor | None = None,
        also: "TernaryLinear | None" = None,
        early: bool = True,
    ) -> Tensor:
        """Multiply few rows, (..., K) to (..., N), fused with norm, gate and residual addition.

        The weights are prepacked at first use, until the end of `prepacked_once`. In a batch of
        texts, (B, 1, K), the bits of each text do not depend on the others. A single text uses the
        fastest kernel for one row, which sums in another order; up to 8 positions of it, (1, T, K),
        have the same bits as one by one.

        Args:
            x: activations; or partial attention results of one text, if the layer `takes_parts`.
            normalise: whether to apply an RMS norm to x first.
            gated: whether to return silu(first half) * second half; must not vary for a layer.
            added: residual to add to the result, of its shape.
            also: a layer of the same spec, whose results for the same rows are appended; must not
                vary for a layer.
            early: whether the next kernel may start before this one has ended: see `overlap`.
        """
        product = self.fused_product_for(x)
        if self._prepacked is None:
            prepack = products.choose_prepacking(product.storage, product.backend)
            packed = self.weight.packed
            if also is not None:
                packed = packed.stack(also.weight.packed)
            self._prepacked = prepack(packed, gated)
        added = None if added is None else added.reshape(-1, added.shape[-1])
        rows, shape = x, torch.Size((1, 1))
        if isinstance(x, Tensor):
            rows, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
        elif product.storage == "int8":
            raise ValueError("parts of attention need ternary weights")
        eps = NORM_EPS if normalise else None
        return product(rows, self._prepacked, eps, added, early).view(*shape, -1)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the decoded weight, (N, K) of `dtype`, cached within `prepacked_once`."""
        if self._decoded is None or self._decoded.dtype != dtype:
            self._decoded = self.weight.weight(dtype)
        return self._decoded

    @contextmanager
    def prepacked_once(self) -> Iterator[None]:
        """Cache the prepacked weight within the block; it must not change meanwhile."""
        try:
            yield
        finally:
            self._prepacked = self._decoded = None
