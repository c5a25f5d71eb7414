"""The linear layer with a packed matrix, fused with the norm before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.config.site import Site
from arbcli.families import FOUR_BIT_PRODUCTS
from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.codec.decode_e4m3 import largest_exponents
from arbcli.kernels.codec.decode_weights import decode_weights_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.digits_matmul import (
    ROWS_ALIKE,
    PrepackedDigits,
    digits_matmul,
    prepack_digits,
    prepack_in_lanes,
)
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.prepacked import Prepacked, prepack
from arbcli.kernels.matmul.prepacked_rows import prepacked_rows
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.kernels.matmul.row_by_row import row_by_row
from arbcli.kernels.matmul.row_matmul import MOST_COLUMNS, row_matmul
from arbcli.kernels.matmul.swizzled import MOST_ROWS
from arbcli.kernels.matmul.ternary_matmul import (
    FUSED_ROWS,
    ternary_matmul,
    ternary_matmul_grad_x,
)
from arbcli.kernels.norm.pack_gates import pack_gates
from arbcli.kernels.runtime.backend import LARGE_ELEMENTS, uses_native, uses_triton
from arbcli.kernels.update.sign_gradient import sign_gradient
from arbcli.model.initial import inner_lr_factor, projection_std
from arbcli.model.layers.compiled import anchor, operator
from arbcli.model.layers.norm import NORM_EPS, PackedGates, TernaryGate, TernaryRMSNorm
from arbcli.model.layers.streamed import GradientSink, StreamedTensor
from arbcli.model.low_precision import LowPrecision, fits
from arbcli.model.packed import DecodingLayer


class LinearWeight(StreamedTensor, LowPrecision):
    """The weight of a `TernaryLinear`."""

    fp8 = False
    """Whether products of many rows are computed in FP8."""
    nvfp4 = False
    """Whether products of many rows are computed in NVFP4, or emulate it."""
    in_eight_bits = True
    """Whether FP8 and NVFP4 are allowed for this weight."""
    decodes_ahead = False
    """Whether it is decoded in a group: see `decode_in_groups`."""
    needed_after: "tuple[LinearWeight, ...]" = ()
    """Weights that a forward decodes in the same launch."""
    needed_before: "tuple[LinearWeight, ...]" = ()
    """Weights that a backward decodes in the same launch."""
    kept_for_backward = False
    """Whether a forward keeps the decoded weight for the backward, which begins with it."""
    keeps_decoded = False
    """Whether the torch backend caches the decoded weight."""
    _kept: Tensor | None = None
    _decoded: tuple[tuple[int, ...], torch.dtype, Tensor] | None = None
    """Version, dtype and values of a weight that was decoded in another weight's launch."""
    _largest: tuple[tuple[int, ...] | None, Tensor | None] = None, None
    """Version, and the largest exponents that the forward computed for it."""

    def multiply_in(self, number_format: str) -> bool:
        """Multiply in FP8 or NVFP4 if the shapes fit: see `LowPrecision`."""
        chosen = self.in_eight_bits and fits(self.out_features, self.in_features)
        self.fp8, self.nvfp4 = (chosen and name == number_format for name in ("fp8", "nvfp4"))
        return chosen

    def multiply_sum(
        self, x: Tensor, added: Tensor, before: "TernaryRMSNorm"
    ) -> tuple[Tensor, Tensor]:
        """Compute total = x + added; return before(total) @ w.T and total."""
        if self._in_fp8(x):
            total, q, scale = before.rounded_sum(x, added)
            return self._multiply_rounded(q, scale, x.dtype), total
        if self._in_nvfp4(x):
            total = x + added
            return self.multiply(total, before), total
        total, normal = before.add_and_norm(x, added)
        return self._multiply(normal), total

    def multiply(self, x: Tensor, before: "TernaryRMSNorm | None") -> Tensor:
        """Compute before(x) @ w.T for (M, K) activations."""
        if self._in_fp8(x):
            rounded = before.rounded(x) if before else quantise_rows(x)
            return self._multiply_rounded(*rounded, x.dtype)
        x = before(x) if before else x
        if self._in_nvfp4(x):
            return import_module(FOUR_BIT_PRODUCTS).nvfp4_product(x, self.packed)
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.decodes_ahead and len(x) > FUSED_ROWS and uses_triton(x):
            dense = self._dense(x.dtype, self.needed_after)
            if self.kept_for_backward and self.is_awaited:
                self._decoded = self.version, dense.dtype, dense
            return x @ dense.T
        if self.keeps_decoded and not uses_triton(x):
            if self._kept is None or self._kept.dtype != x.dtype:
                self._kept = self.weight(x.dtype)
            return x @ self._kept.T
        return ternary_matmul(x, self.packed)

    def _multiply_rounded(self, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the product in FP8, and save the largest exponents for the next backward.

        Each forward computes them anew, so that captured graphs do too.
        """
        largest = largest_exponents(self.packed)
        self._largest = self.version, largest
        return fp8_matmul(q, scale, self.packed, dtype=dtype, largest=largest)

    def propagate(self, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w, the gradient of x, from the (M, N) gradient of a product."""
        if self._in_fp8(grad_y):
            (version, largest), self._largest = self._largest, (None, None)
            known = largest if version == self.version else None
            q, scale = quantise_rows(grad_y)
            return fp8_matmul(
                q, scale, self.packed, transposed=True, dtype=grad_y.dtype, largest=known
            )
        if self._in_nvfp4(grad_y):
            products = import_module(FOUR_BIT_PRODUCTS)
            return products.nvfp4_product(grad_y, self.packed, transposed=True)
        if self.decodes_ahead and uses_triton(grad_y):
            return grad_y @ self._dense(grad_y.dtype, self.needed_before)
        return ternary_matmul_grad_x(grad_y, self.packed)

    def _dense(self, dtype: torch.dtype, group: "tuple[LinearWeight, ...]") -> Tensor:
        """Decode the weight, and in the same launch those of `group`, which are needed next.

        A weight decoded in advance is used once, if its version has not changed.
        """
        decoded, self._decoded = self._decoded, None
        if decoded is not None and decoded[:2] == (self.version, dtype):
            return decoded[2]
        group = tuple(each for each in group if not (each.fp8 or each.nvfp4))
        own, *others = decode_weights_triton([each.packed for each in (self, *group)], dtype)
        for weight, dense in zip(group, others, strict=True):
            weight._decoded = weight.version, dtype, dense
        return own

    @contextmanager
    def decoded_once(self) -> Iterator[None]:
        """Cache the decoded weight within the block; it must not change meanwhile."""
        self.keeps_decoded = True
        try:
            yield
        finally:
            self.keeps_decoded, self._kept = False, None

    def _in_fp8(self, rows: Tensor) -> bool:
        return self.fp8 and len(rows) > FUSED_ROWS

    def _in_nvfp4(self, rows: Tensor) -> bool:
        return self.nvfp4 and len(rows) > FUSED_ROWS

    def emit_gradient(
        self, sink: GradientSink, sources: tuple[Tensor, ...], grad_y: Tensor
    ) -> None:
        """Compute the gradient, or only its signs if the rule reads no more, for the sink."""
        if self.rule.reads_signs and getattr(sink, "takes_signs", False):
            source = sources[0] if len(sources) == 1 else torch.cat(sources)
            sink(self, sign_gradient(grad_y, source, self.packed))
        else:
            super().emit_gradient(sink, sources, grad_y)

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Compute grad_y.T @ x, with float32 accumulation and one rounding to the dtype of x."""
        return grad_y.T @ source

    def product_backward(
        self,
        grad_y: Tensor,
        x: Tensor | PackedGates,
        before: "TernaryRMSNorm | None",
        wanted: bool,
        *,
        other_grad: Tensor | None = None,
        overwrite: bool = False,
    ) -> Tensor | None:
        """Run the backward of `multiply`: collect the weight's gradient, and return that of x.

        Args:
            grad_y: (M, N).
            x: (M, K), or the input of `before`, packed or not.
            before: as in `multiply`.
            wanted: whether the gradient of x is needed; else the result may be None.
            other_grad: another gradient of x, which `before` adds.
            overwrite: whether the gradient of a gate may overwrite x.
        """
        grad_x: Tensor | None = None
        source: Any = x
        if wanted or (before and before.trained):
            grad_x = self.propagate(grad_y)
            if before:
                grad_x, source = before.backward(grad_x, source, other_grad, overwrite)
        elif before:
            source = before(source)
        self.collect(source, grad_y)
        return grad_x


MOST_AT_ONCE = 2**22
"""Maximum number of weights of several blocks that are decoded in one launch: 8 MiB in bf16."""
MOST_KEPT = 2**21
"""Maximum number of weights that stay decoded between a forward and its backward: 4 MiB in bf16."""


def decode_in_groups(
    blocks: list[list[LinearWeight]], head: LinearWeight | None, *, across: bool
) -> None:
    """Decode small matrices in groups, as decoding one takes less time than its launch.

    A backward begins with smaller groups, as decoded weights would add to the peak while most
    activations are still in memory. Later groups begin at the boundaries of blocks.

    Args:
        blocks: the weights of each block, equally many, in the order of a forward, each once.
        head: the weight that is used after them, if it is used once, and as a whole.
        across: whether a group may have weights of several blocks and of the head. A block that is
            recomputed uses weights of its own only.
    """
    weights = [weight for block in blocks for weight in block]
    large = any(weight.num_weights >= LARGE_ELEMENTS for weight in weights)
    if not weights or large or weights[0].rule.reads_all:
        return
    after = [head] if across and head and head.num_weights < LARGE_ELEMENTS else []
    size, number = len(blocks[0]), len(weights)
    at_once = MOST_AT_ONCE // sum(weight.num_weights for weight in blocks[0]) if across else 1
    length = size * max(1, at_once)
    forward, first = range(0, number, length), len(after)
    back = (0, first + 1, *range(first + size - 1, first + number, length))
    weights += after
    for order, starts, name in (
        (weights, forward, "needed_after"),
        (weights[::-1], back, "needed_before"),
    ):
        for begin, end in zip(starts, (*starts[1:], len(weights)), strict=True):
            for index in range(begin, end):
                order[index].decodes_ahead = True
                setattr(order[index], name, tuple(order[index + 1 : end]))
    kept = weights[::-1][: first + size - 1] if across else []
    if sum(weight.num_weights for weight in kept) <= MOST_KEPT:
        for weight in kept:
            weight.kept_for_backward = True


class _Linear(Function):
    """y = before(x) @ w.T. The gradient of w goes to the weight's sink.

    `anchor` is an empty tensor that requires a gradient, so that the backward also runs if x does
    not require one.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: LinearWeight,
        before: TernaryRMSNorm | None,
        consumes: bool,
        anchor: Tensor,
        trained: bool,
    ) -> Tensor:
        if trained:
            weight.await_backward()
            if before:
                before.await_backward()
        return weight.multiply(x, before)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.weight, ctx.before, ctx.consumes, *_ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = ctx.weight.product_backward(
            grad_y, x.detach(), ctx.before, ctx.needs_input_grad[0], overwrite=ctx.consumes
        )
        return grad_x, None, None, None, None, None


_linear = operator(_Linear, lambda x, trits, *_: x.new_empty(len(x), len(trits)))


class _LinearOfSum(Function):
    """total = x + added, y = before(total) @ w.T; otherwise like `_Linear`.

    `total` is also an output, the residual stream, so its gradient is added.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor, anchor: Tensor, weight: LinearWeight,
        before: TernaryRMSNorm,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.weight, ctx.before = weight, before
        ctx.set_materialize_grads(False)
        y, total = weight.multiply_sum(x, added, before)
        ctx.save_for_backward(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        (total,) = ctx.saved_tensors
        grad = ctx.weight.product_backward(grad_y, total, ctx.before, True, other_grad=grad_total)
        return grad, grad, None, None, None


class _LinearOfGates(Function):
    """y = before(x) @ w.T of gate and up, which are packed for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: LinearWeight, before: TernaryGate
    ) -> Tensor:
        ctx.weight, ctx.before = weight, before
        y = weight.multiply(x, before)
        ctx.save_for_backward(*pack_gates(x))
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kept = PackedGates(*ctx.saved_tensors)
        grad = ctx.weight.product_backward(grad_y, kept, ctx.before, True, overwrite=True)
        return grad, None, None, None


class TernaryLinear(DecodingLayer):
    """y = x @ w.T with packed ternary weights.

    Args:
        out_features: N.
        in_features: K.
        site: storage settings and width of the stage.
        area: parameter group of the weights.
        std: initial standard deviation of the weights; None is `projection_std`.
        spread: initial standard deviation of z relative to the rule's; 0 initialises to zero.
        lr_factor: factor of the learning rate; None is `inner_lr_factor`.
        in_eight_bits: whether `--compute fp8` and `nvfp4` apply to the layer.
    """

    averages = True
    """Whether `fused` may take the partial results of split-KV attention."""
    _prepacked: Prepacked | PrepackedDigits | None = None
    _decoded: Tensor | None = None

    def __init__(
        self,
        out_features: int,
        in_features: int,
        site: Site,
        *,
        area: str,
        std: float | None = None,
        spread: float = 1.0,
        lr_factor: float | None = None,
        in_eight_bits: bool = True,
    ) -> None:
        super().__init__()
        self.weight = LinearWeight(
            out_features,
            in_features,
            site,
            area=area,
            std=std or projection_std(in_features),
            spread=spread,
            lr_factor=lr_factor or inner_lr_factor(site, site.direction),
        )
        self.weight.in_eight_bits = in_eight_bits

    def forward(
        self,
        x: Tensor,
        before: TernaryRMSNorm | None = None,
        added: Tensor | None = None,
        *,
        consumes: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Multiply (..., K) activations to (..., N) of the same dtype.

        Args:
            x: activations.
            before: norm or gate applied to x first; its backward is part of the product's, so that
                only x is saved.
            added: tensor added to x before that; the sum is then returned too.
            consumes: whether the caller no longer needs x, so that the backward of a gate may
                overwrite it.
        """
        compiled = torch.compiler.is_compiling()
        if compiled and added is not None:
            x = x + added
            return self(x, before), x
        rows = x.reshape(-1, x.shape[-1])
        if added is None:
            packs = consumes and isinstance(before, TernaryGate) and before.packs
            if packs and torch.is_grad_enabled():
                self.weight.await_backward()
                y = _LinearOfGates.apply(rows, anchor(x), self.weight, before)
            else:
                y = _linear(rows, self.weight, before, consumes and not compiled)
        else:
            if torch.is_grad_enabled():
                self.weight.await_backward()
                if before:
                    before.await_backward()
            parts = rows, added.reshape(rows.shape), anchor(x)
            y, total = _LinearOfSum.apply(*parts, self.weight, before)
            return y.view(*x.shape[:-1], -1), total.view(x.shape)
        return y.view(*x.shape[:-1], -1)

    @property
    def takes_parts(self) -> bool:
        """Whether `fused` takes partial attention results: of one row, for ternary weights."""
        of_trits = not self.weight.rule.reads_all
        return self.averages and of_trits and self.weight.in_features <= MOST_COLUMNS

    @torch.no_grad()
    def fused(
        self,
        x: Tensor | AttentionParts,
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
            also: a layer of the same site, whose results for the same rows are appended; must not
                vary for a layer.
            early: whether the next kernel may start before this one has ended: see `overlap`.
        """
        all_digits = self.weight.rule.reads_all
        eps = NORM_EPS if normalise else None
        added = None if added is None else added.reshape(-1, added.shape[-1])
        if self._prepacked is None:
            of_digits = prepack_in_lanes if uses_native(self.weight.trits) else prepack_digits
            pack = of_digits if all_digits else prepack
            self._prepacked = pack(self._stacked(also), gated)
        weight = self._prepacked
        if isinstance(x, AttentionParts):
            if not isinstance(weight, Prepacked):
                raise ValueError("parts of attention need ternary weights")
            return row_matmul(x, weight, eps, added, early=early).view(1, 1, -1)
        rows, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
        if isinstance(weight, PrepackedDigits):
            # the work division of the GPU kernel depends on the number of rows; C loops over rows
            most = MOST_ROWS if len(x) > 1 else ROWS_ALIKE
            most = len(rows) if uses_native(rows) else most
            pieces = [slice(at, at + most) for at in range(0, len(rows), most)]
            found = [
                digits_matmul(rows[piece], weight, eps, None if added is None else added[piece])
                for piece in pieces
            ]
            y = found[0] if len(found) == 1 else torch.cat(found)
        elif len(rows) == 1 and self.takes_parts:
            y = row_matmul(rows, weight, eps, added, early=early)
        elif len(x) == 1 and len(rows) <= MOST_ROWS and self.takes_parts:
            y = row_by_row(rows, weight, eps, added, early=early)
        else:
            y = prepacked_rows(rows, weight, eps, added)
        return y.view(*shape, -1)

    def _stacked(self, also: "TernaryLinear | None") -> Packed:
        """Stack the weights of another layer below these."""
        packed = self.weight.packed
        return packed if also is None else packed.above(also.weight.packed)

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
