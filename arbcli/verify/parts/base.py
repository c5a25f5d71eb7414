"""Shared pieces of references: inputs, choices of a model, norms, rotations, windows.

A reference computes a text at a time, in float64. Weights are decoded and have their names within
the part, less `.weight`; weights of a norm are (1, D), gains (D, 1), and a norm without weights
multiplies by 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.rotary import PLAIN, RotaryConfig

Weights = Mapping[str, Tensor]
Kind = TypeVar("Kind", bound=PartConfig)


@dataclass(slots=True)
class Choices:
    """Choices of a model, so that its reference goes the same way where scores are close."""

    by_module: dict[str, list[Tensor]] = field(default_factory=dict)
    """Choices by the name of the module, (B, ...) each, in order."""
    scores: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Scores of the entries that were chosen, and of the best ones, sorted, by the reference."""
    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Products of indexers that the model has above 0, others 0, and those that are above 0."""

    def judge(self, chosen: Tensor, every: Tensor) -> None:
        """Note the scores (..., k) of what was chosen, and the best k of all (..., n)."""
        best = every.detach().sort(dim=-1, descending=True).values[..., : chosen.shape[-1]]
        mine = chosen.detach().sort(dim=-1, descending=True).values
        self.scores.append((mine.flatten(), best.flatten()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Where a part stands, and what it reads besides the stream of one text."""

    config: PartConfig | None
    """Configuration of the part; None outside of all parts."""
    site: LayerSpec
    name: str = ""
    """Name of the part in the model."""
    text: Sequence[int] = ()
    """Bytes of the whole text."""
    places: Sequence[int] = ()
    """The byte that each position stands for."""
    row: int = 0
    """Number of the text in its batch."""
    slots: int = 0
    """Positions of a window, of which a text may have fewer."""
    iteration: int = 0
    """How often the part was run on this text before."""
    memories: Mapping[str, Tensor] = field(default_factory=dict)
    """Integer buffers of the model by name."""
    choices: Choices | None = None
    """Choices of the model, which are used and judged; None selects the best."""
    terms: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)
    """Terms of the losses, which are their averages, by loss and by part; see `note`."""

    def within(self, name: str, config: PartConfig, iteration: int = 0) -> "Reading":
        """Return the inputs of a part within this one."""
        return replace(self, name=self.full_name(name), config=config, iteration=iteration)

    def config_of(self, kind: type[Kind]) -> Kind:
        """Return the configuration, which must be of this kind.

        Raises:
            TypeError: it is of another.
        """
        if not isinstance(self.config, kind):
            raise TypeError(f"need a configuration of {kind.__name__}, got {self.config}")
        return self.config

    @property
    def judged(self) -> Choices:
        """The choices of the model, where they are taken.

        Raises:
            ValueError: there are none.
        """
        if self.choices is None:
            raise ValueError("there are no choices to judge")
        return self.choices

    def full_name(self, name: str) -> str:
        """Name a module within the part."""
        return f"{self.name}.{name}" if self.name and name else self.name or name

    def memory(self, name: str) -> Tensor:
        """Return an integer buffer by its name within the part."""
        return self.memories[self.full_name(name)]

    def taken(self, name: str = "") -> list[Tensor] | None:
        """Return the model's choices for this text in the part or one within it; None: choose."""
        if self.choices is None:
            return None
        return [choice[self.row] for choice in self.choices.by_module[self.full_name(name)]]

    def note(self, loss: str, terms: Tensor) -> None:
        """Note (n, ...) terms of a loss."""
        self.terms.setdefault(loss, {}).setdefault(self.name, []).append(terms)


def under(w: Weights, prefix: str) -> Weights:
    """Choose the weights of a part, by their names within it."""
    prefix += "."
    return {name.removeprefix(prefix): w[name] for name in w if name.startswith(prefix)}


def norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divide by the root-mean-square, and multiply by D weights."""
    x = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight.flatten()


def output_of(
    y: Tensor, w: Weights, *, normalise: bool = True, rounded_eps: float | None = None
) -> Tensor:
    """Multiply by the output projection of a part, after its norm, if there is one.

    With an epsilon, `rounded_eps`, the norm's result is rounded as BitNet's.
    """
    if rounded_eps is not None:
        return rounded(norm(y, w["sub_norm"], rounded_eps)) @ w["output"].T
    return (norm(y, w.get("sub_norm")) if normalise else y) @ w["output"].T


def rounded(y: Tensor) -> Tensor:
    """Round rows of (T, D) to -127..127 times a scale; the gradient is that of y."""
    scale = y.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
    return y + ((y / scale).round() * scale - y).detach()


def gated(x: Tensor, limit: float = math.inf) -> Tensor:
    """Multiply the second half of (..., 2 D) by the silu of the first, both limited."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def rotary_angles(places: Tensor, width: int, rotary: RotaryConfig = PLAIN) -> Tensor:
    """Compute angles place * base**(-2 i / width), scaled, (..., width / 2) float64."""
    rates = [_rate(i, width, rotary) for i in range(width // 2)]
    return places[..., None] * torch.tensor(rates, dtype=torch.float64, device=places.device)


def _rate(i: int, width: int, rotary: RotaryConfig) -> float:
    """Compute the radians by which pair i turns from a position to the next."""
    rate, kept = rotary.base ** (-2 * i / width), 0.0
    if rotary.scaling == "llama3":
        turns = rotary.original_ctx * rate / (2 * math.pi)
        low, high = rotary.low or 1.0, rotary.high or 4.0
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    elif rotary.scaling == "yarn":
        assert rotary.original_ctx is not None  # the configuration needs it
        # the number of the pair, not an integer, that turns so many times in the original context
        first, last = (
            width * math.log(rotary.original_ctx / (turns * 2 * math.pi), rotary.base) / 2
            for turns in (rotary.high or 32.0, rotary.low or 1.0)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        if first == last:
            last += 0.001
        kept = 1 - min(max((i - first) / (last - first), 0.0), 1.0)
    return rate * (kept + (1 - kept) / rotary.factor)


def turn(
    x: Tensor, places: Tensor, width: int | None = None, rotary: RotaryConfig = PLAIN
) -> Tensor:
    """Rotate the first `width / 2` pairs (i, i + d / 2) of heads, (T, ..., d), by `places`, (T,).

    None is all pairs.
    """
    half, width = x.shape[-1] // 2, width or x.shape[-1]
    angles = torch.zeros(len(x), half, dtype=torch.float64, device=x.device)
    angles[:, : width // 2] = rotary_angles(places, width, rotary)
    angles = angles.view(len(x), *[1] * (x.dim() - 2), half)
    rotated = torch.complex(*x.split(half, dim=-1)) * torch.exp(1j * angles)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def positions(x: Tensor) -> Tensor:
    """Number the positions of (T, ...)."""
    return torch.arange(len(x), device=x.device)


def sees_last(length: int, window: int, device: torch.device, *, causal: bool = True) -> Tensor:
    """Return the attention mask of a window, (T, T) bool: the last `window` positions.

    A position sees itself and, unless the mask is causal, as many positions after it.
    """
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    if not causal:
        distance = distance.abs()
    return (distance >= 0) & (distance < window)
