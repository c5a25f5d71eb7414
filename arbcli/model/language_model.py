"""What every language model here has: its weights by name, their initialisation, its losses."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.dense import ModelConfig
from arbcli.errors import ArbError
from arbcli.kernels.attention.eight_bits import FORMATS
from arbcli.model.baselines import FloatWeight
from arbcli.model.cache import CachedAttention
from arbcli.model.layers.linear import LinearWeight, TernaryLinear
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.layers.streamed import StreamedTensor, recompute_contexts
from arbcli.model.layers.vector import TernaryTaps, TernaryVector
from arbcli.model.packed import StateModule, TernaryTensor

RECOMPUTE = {
    "use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none",
    "context_fn": recompute_contexts,
}  # fmt: skip
"""How torch is to compute a block again: there is no dropout, and shapes do not change."""
LOSS_WEIGHTS = {"ponder": 0.01, "ratio": 0.3, "indexer": 1.0}
"""What each part of a loss counts in what is minimised, the text's being 1.

The source of `ratio` has 0.03. With ten times that chunks keep to the length that was asked for.
Weights that learn by `indexer` learn by nothing else.
"""


class Phase(NamedTuple):
    """A part of reading one byte of a text, with the same shapes every time."""

    depth: int
    """It runs if the phases before it have led so deep; the first ones, of depth 0, always do."""
    run: Callable[[], Tensor | None]
    """Do it; that of the last phase returns the logits, (1, 1, 256)."""
    leads_deeper: Callable[[], Tensor] | None = None
    """Afterwards, a tensor of one bool: whether phases that are one deeper run; None is no."""
    handle: Tensor | None = None
    """Int64 of one element: that of the conditional node that is told so, 0 being none; None where
    there can be none."""


class LanguageModel(nn.Module):
    """A language model over bytes; a subclass says how it goes from bytes to logits."""

    config: ModelConfig
    compute_dtype: torch.dtype

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a byte, over (B, T) int64 inputs and targets."""
        raise NotImplementedError

    def losses(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the loss that a step minimises, each times its `LOSS_WEIGHTS`."""
        return {"text": self.loss(ids, targets)}

    def step_phases(self, ids: Tensor, cache: Any) -> list[Phase]:
        """List what reading one byte of a text takes, in order.

        Args:
            ids: (1, 1) int64, read anew in every step.
            cache: of `new_cache`.
        """
        return [Phase(0, lambda: self(ids, cache))]

    def after_step(self) -> None:
        """Let integer memories take in what a step has seen; all of it on the device."""

    def gauges(self) -> dict[str, float]:
        """Measure what is worth a line in the log beside the loss; waits for the device."""
        return {}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(itertools.chain(self.buffers(), self.parameters())).device

    @property
    def plain_norms(self) -> bool:
        """Whether there are norms, and the weights of all of them are known to be ones."""
        norms = [part for part in self.modules() if isinstance(part, TernaryRMSNorm)]
        return bool(norms) and all(norm.plain for norm in norms)

    @property
    def fits_bytes(self) -> bool:
        """Whether what each weight of its linear layers is made of is within a byte."""
        return all(matrix.rule.fits_a_byte for matrix in self._matrices())

    makes_several = False
    """Whether `new_several_cache` makes a cache for several texts, which a forward takes."""

    weights_are_prepared = False
    """Whether this is inside `prepared_weights`."""

    @contextmanager
    def prepared_weights(self, spare_bytes: int = 0) -> Iterator[None]:
        """Make what follows from the weights once, not in every forward.

        Those of a float twin are cast; matrices stay packed, but steps of a text arrange them anew.
        Meanwhile no weight must change.

        Args:
            spare_bytes: where products are torch's, matrices are decoded once and kept if all of
                them take no more.
        """
        with ExitStack() as stack:
            if self.decoded_bytes <= spare_bytes:
                for weight in self._matrices():
                    stack.enter_context(weight.decoded_once())
            for part in self.modules():
                if isinstance(part, FloatWeight):
                    stack.enter_context(part.cast_once(self.compute_dtype))
                elif isinstance(part, TernaryLinear | TernaryTaps | TernaryVector):
                    stack.enter_context(part.arranged_once())
            before, self.weights_are_prepared = self.weights_are_prepared, True
            try:
                yield
            finally:
                self.weights_are_prepared = before

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all matrices of linear layers, decoded to the dtype of activations."""
        return sum(weight.num_weights for weight in self._matrices()) * self.compute_dtype.itemsize

    def _matrices(self) -> list[LinearWeight]:
        return [part for part in self.modules() if isinstance(part, LinearWeight)]

    stored: torch.dtype | None = None
    """What a cache keeps keys and values in; None is the dtype of activations."""

    @contextmanager
    def keeping(self, kv: str | None) -> Iterator[None]:
        """Keep keys and values in another type in caches that are made here.

        A forward without a cache rounds them as such a cache does, so that its losses are those of
        a text that is read byte by byte. It is for reading only: no gradient is promised.

        Args:
            kv: `bf16`, which activations must be too, `fp8` or `int8`; None is the dtype of
                activations.

        Raises:
            ArbError: the model keeps none, or not so.
        """
        if kv == "bf16" and self.compute_dtype != torch.bfloat16:
            raise ArbError(
                "keys and values are kept in the dtype of activations, which is float32",
                hint="leave `--kv` out, or give `--compute bf16` too",
            )
        stored = FORMATS.get(kv)
        attentions = [part for part in self.modules() if isinstance(part, CachedAttention)]
        if stored and not attentions:
            raise ArbError("this model keeps no keys and values", hint="leave `--kv` out")
        before = self.stored
        for part in (self, *attentions):
            part.stored = stored
        try:
            yield
        finally:
            for part in (self, *attentions):
                part.stored = before

    @property
    def kept_in(self) -> str:
        """Name the type that keys and values are kept in."""
        for name, stored in FORMATS.items():
            if stored == self.stored:
                return name
        return "bf16" if self.compute_dtype == torch.bfloat16 else "fp32"

    def initialise(self, seed: int) -> None:
        """Draw all weights anew, as each layer declares: see `initial`."""
        for index, weight in enumerate(self.weights().values()):
            weight.initialise(seed, index)

    def forget_uses(self) -> None:
        """Forget forwards whose backward never came, as after an error."""
        for part in self.modules():
            if isinstance(part, StreamedTensor):
                part.forget()

    def drop_training_state(self) -> None:
        """Forget what only a step needs, for good: see `TernaryTensor.drop_training_state`."""
        for weight in self.weights().values():
            weight.drop_training_state()

    def declare_wire(self) -> None:
        """Declare what a run that is shared out keeps besides: `TernaryTensor.declare_wire`."""
        for weight in self.weights().values():
            weight.declare_wire()

    def join(self, group: Any) -> None:
        """Bring together what each process has seen of a step, before `after_step`.

        Args:
            group: `arbcli.train.parallel.group.Group`.
        """

    def state_modules(self) -> Iterator[StateModule]:
        """Go through everything that declares buffers, in the order of the model."""
        return (part for part in self.modules() if isinstance(part, StateModule))

    def weights(self) -> dict[str, TernaryTensor | FloatWeight]:
        """Name every weight, in the order of the model."""
        kinds = (TernaryTensor, FloatWeight)
        return {name: part for name, part in self.named_modules() if isinstance(part, kinds)}
