"""A mixture of experts between shared projections, all of fixed shapes.

Every position goes to its `moe_top_k` best experts. The pairs (position, expert) are sorted by
expert on the device, and one grouped product serves them all: nothing waits to learn how many an
expert has. The load is kept even by a small integer that each expert adds to its score when experts
are chosen, and not when they are weighted. Source: L. Wang et al., "Auxiliary-Loss-Free Load
Balancing", https://arxiv.org/abs/2408.15664.

The gate says what a product z of a query and a key counts:

| | an expert's score s | chosen | weighed by |
|---|---|---|---|
| `softmax` | z | the best s + balance | softmax of the chosen s |
| `softplus` | sqrt(log(1 + exp(z))) | the best s + balance | s over the sum of the chosen s |
| `hash` | the same | by the text: see `hashed_experts` | the same |

The root grows slowly, so that no product, however large, is out of reach of the balance for long,
and a weight never falls to nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from arbcli.config.parts.experts import ExpertsConfig
from arbcli.config.site import Site
from arbcli.kernels.norm.rms_norm import FEW_ROWS
from arbcli.kernels.rows.expert_combine import expert_combine, expert_combine_backward
from arbcli.model.flow import Flow, Reading, each_text
from arbcli.model.initial import output_std
from arbcli.model.layers.compiled import Findable, operator
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.streamed import recomputing
from arbcli.model.parts.base import Part
from arbcli.model.parts.hashed_experts import hashed_experts
from arbcli.model.step_memory import StepMemory

BALANCE_UNIT = 1 / 8
"""The addition to the score of an expert for one unit of its balance."""
ROOT_BALANCE_UNIT = 1 / 32
"""The same of roots: as much at z = 0, where they rise by 0.3, and as far, to z = 16."""
MOST_BALANCE = 127
LEAST_LOGIT = -40.0
"""Where a score of roots ends: below it there is no gradient, and none that is not finite."""


class Routing(NamedTuple):
    """Which positions go to which experts; S = M * k slots, sorted by expert."""

    positions: Tensor
    """(M, k) int64: where the slots of a position are."""
    tokens: Tensor
    """(S,) int64: the position of each slot."""
    bounds: Tensor
    """(E + 1,) int64: slots of expert e are bounds[e] to bounds[e + 1] - 1."""


def route(choice: Tensor, experts: int) -> Routing:
    """Sort the slots of (M, k) int64 choices by expert."""
    sorted_choice, order = choice.flatten().sort(stable=True)
    slots = torch.arange(len(order), device=order.device)
    positions = torch.empty_like(order).scatter_(0, order, slots)
    bounds = torch.searchsorted(sorted_choice, torch.arange(experts + 1, device=order.device))
    return Routing(positions.view(choice.shape), order // choice.shape[1], bounds)


class _Dispatch(Function):
    """Copy positions to their slots; the gradients of a position's slots are added up."""

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        return x[tokens]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return expert_combine(grad, positions, None), None, None


class _Combine(Function):
    """Add up what experts gave for a position, weighted."""

    @staticmethod
    def forward(values: Tensor, positions: Tensor, gates: Tensor) -> Tensor:
        return expert_combine(values, positions, gates)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grad_values, grad_gates = expert_combine_backward(grad_y, *ctx.saved_tensors)
        return grad_values, None, grad_gates


_dispatch, _combine = operator(_Dispatch), operator(_Combine)


def root_softplus(logits: Tensor) -> Tensor:
    """Compute sqrt(log(1 + exp(z))) of float32 numbers."""
    return functional.softplus(logits.clamp(min=LEAST_LOGIT)).sqrt()


class Gate(Findable, StepMemory):
    """Choose experts: the scores are of products of a ternary query with a ternary key of each.

    Args:
        config: of the experts.
        width: of a query.
        site: where they stand.
        area: the part of the model that they are.
    """

    balance: Tensor
    _load: Tensor | None

    def __init__(self, config: ExpertsConfig, width: int, site: Site, area: str) -> None:
        super().__init__(area=area)
        parts = layers_for(site)
        self.top_k, self.experts, self.kind = config.top_k, config.experts, config.gate
        self.norm = parts.norm(width, site)
        self.keys = parts.linear(config.experts, width, site, area=area)
        if self.kind != "hash":
            self.declare("balance", torch.zeros(config.experts, dtype=torch.int8), "counters")
        self.load = torch.zeros(config.experts, dtype=torch.int64)
        """Slots of each expert in the last step."""
        self.forget()

    def forward(
        self, query: Tensor, chosen: Tensor | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Turn (M, width) queries into (M, k) int64 experts and their float32 weights.

        Args:
            query: of each position.
            chosen: (M, k) int64, if experts are chosen already, as by a hash; they are weighted.
            valid: (M,) bool, which positions there are; the others do not count as load.
        """
        return self.weigh(self.keys(query, self.norm).float(), chosen, valid)

    def weigh(
        self, scores: Tensor, chosen: Tensor | None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Do the same with (M, E) float32 products of queries and keys."""
        unit = BALANCE_UNIT
        if self.kind != "softmax":
            scores, unit = root_softplus(scores), ROOT_BALANCE_UNIT
        if chosen is None:
            chosen = (scores.detach() + self.balance * unit).topk(self.top_k).indices
        if torch.is_grad_enabled():
            chosen = _counted(chosen, valid, self)
        if self.kind == "softmax":
            return chosen, torch.softmax(scores.gather(1, chosen), dim=1)
        scores = scores.gather(1, chosen)
        return chosen, scores / scores.sum(dim=1, keepdim=True)

    def count(self, chosen: Tensor, valid: Tensor | None) -> None:
        """Count the load of choices, (M, k), of which those that are not `valid` are none."""
        if recomputing():
            return
        every = torch.arange(self.experts, device=chosen.device)
        counted = chosen if valid is None else chosen.masked_fill(~valid[:, None], -1)
        load = (counted.flatten() == every[:, None]).sum(dim=1)
        self._load = load if self._load is None else self._load + load

    @property
    def found_by(self) -> Tensor:
        """The load."""
        return self.load

    def join(self, group: Any) -> None:
        """Add up the loads of all processes."""
        self._load = None if self._load is None else group.sum(self._load)

    @torch.no_grad()
    def after_step(self) -> None:
        """Make experts that had more than their share a little less likely, and others more."""
        if self._load is not None:
            load, self._load = self._load, None
            self.load.copy_(load)
            if self.kind == "hash":
                return
            moved = self.balance + torch.sign(load.sum() - load * self.experts)
            self.balance.copy_(moved.clamp_(-MOST_BALANCE, MOST_BALANCE))

    def forget(self) -> None:
        """Forget the load of a step that never ended."""
        self._load = None

    def gauges(self) -> dict[str, float]:
        """Measure the load; waits for the device.

        Returns:
            fullest_expert: slots of the expert with most of them, over the mean.
        """
        return {"fullest_expert": float(self.load.max() / self.load.float().mean().clamp(min=1e-9))}


def _count(chosen: Tensor, valid: Tensor | None, gate: Gate) -> Tensor:
    gate.count(chosen, valid)
    return chosen


_counted = operator(_count, lambda chosen, *_: chosen)


class SharedExpert(nn.Module):
    """The expert that every position goes to, besides those that it chooses."""

    def __init__(
        self, config: ExpertsConfig, dim: int, site: Site, *, area: str, std: float | None
    ) -> None:
        super().__init__()
        parts = layers_for(site)
        self.gate_up = parts.linear(2 * config.width, dim, site, area=area)
        self.sub_norm = _middle(config, site)
        self.down = parts.linear(dim, config.width, site, area=area, std=std)

    def forward(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Transform every position of (M, dim)."""
        return self.down(self.gate_up(x, norm), self.sub_norm)


def _middle(config: ExpertsConfig, site: Site) -> nn.Module:
    """Make what is between the two matrices of an expert."""
    parts = layers_for(site)
    kind = parts.clamped_gate if config.clamp else parts.gate
    return kind(config.width, site, normalise=True)


def _in_few_rows(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise rows, each by a program of its own: with more at once sums have other orders."""
    return torch.cat([norm(some) for some in x.split(FEW_ROWS)])


class Experts(Part):
    """Gated MLPs of which each position uses a few.

    As a channel mixer they read and write the stream, which is also the query of their gate.

    Args:
        config: their shape.
        site: where they stand.
        dim: width of inputs and outputs; None is that of the stream.
        query: width of the gate's queries; None is that of the stream.
        area: the part of the model that they are.
    """

    name = "experts"
    steps_texts = True

    def __init__(
        self,
        config: ExpertsConfig,
        site: Site,
        dim: int | None = None,
        query: int | None = None,
        area: str = "experts",
    ) -> None:
        super().__init__()
        parts, width, number = layers_for(site), dim or site.dim, config.experts
        # what is added to the stream is small at first
        std = output_std(config.width, site.depth) if dim is None else None
        self.gate = Gate(config, query or site.dim, site, area)
        self.gate_up = parts.expert_weight(number, 2 * config.width, width, site, area=area)
        self.sub_norm = _middle(config, site)
        self.down = parts.expert_weight(number, width, config.width, site, area=area, std=std)
        self.shared = None
        if config.shared:
            self.shared = SharedExpert(config, width, site, area=area, std=std)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: None = None,
    ) -> Flow:
        """Send every position of (B, T, D) to its experts: see `Part.forward`."""
        x = x if added is None else x + added
        rows, valid = x.flatten(0, 1), reading.valid if reading else None
        chosen = self.by_hash(reading)
        valid = None if valid is None else valid.flatten()
        return Flow(x, self.mix(rows, rows, chosen, norm, valid).view(x.shape))

    @torch.no_grad()
    def step_texts(self, x: Tensor, norm: nn.Module, reading: Reading) -> Tensor:
        """Send a position of each of several texts to its experts: see `Part.step_texts`."""
        rows = x.flatten(0, 1)
        scores = self.gate.keys.fused(rows, normalise=True).float()
        chosen, gates = self.gate.weigh(scores, self.by_hash(reading))
        routing = route(chosen, self.gate.experts)
        slots = _in_few_rows(norm, rows[routing.tokens])
        slots = self.gate_up.product(slots, routing.bounds, apart=True)
        slots = _in_few_rows(self.sub_norm, slots)
        slots = self.down.product(slots, routing.bounds, apart=True)
        y = expert_combine(slots, routing.positions, gates)
        if self.shared:
            shared = self.shared
            y = y + each_text(lambda row: shared(row, norm), rows)
        return y.view(x.shape)

    def by_hash(self, reading: Reading | None) -> Tensor | None:
        """Choose experts by the text, (M, k) int64; None if the gate chooses."""
        if self.gate.kind != "hash":
            return None
        if reading is None or reading.grams is None:
            raise ValueError("experts that are chosen by a hash need the text")
        return hashed_experts(reading.grams, self.gate.experts, self.gate.top_k)

    def mix(
        self,
        x: Tensor,
        query: Tensor,
        chosen: Tensor | None = None,
        before: nn.Module | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Send (M, dim) to experts, and add up what they give.

        Args:
            x: their inputs.
            query: (M, query width), of the gate.
            chosen: (M, k) int64; None are those that the gate chooses.
            before: norm of the inputs.
            valid: (M,) bool, which positions there are; None is all of them.
        """
        chosen, gates = self.gate(query, chosen, valid)
        routing = route(chosen, self.gate.experts)
        slots = _dispatch(x, routing.tokens, routing.positions)
        slots = self.gate_up.multiply(slots, routing.bounds, before)
        slots = self.down.multiply(slots, routing.bounds, self.sub_norm)
        y = _combine(slots, routing.positions, gates)
        return y + self.shared(x, before) if self.shared else y
