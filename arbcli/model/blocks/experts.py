"""A mixture of experts between shared projections, all of fixed shapes.

Every position goes to its `moe_top_k` best experts. The pairs (position, expert) are sorted by
expert on the device, and one grouped product serves them all: nothing waits to learn how many an
expert has. The load is kept even by a small integer that each expert adds to its score when experts
are chosen, and not when they are weighted. Source: L. Wang et al., "Auxiliary-Loss-Free Load
Balancing", https://arxiv.org/abs/2408.15664.

`moe_gate` says what a product z of a query and a key counts:

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

from arbcli.config.graph import GraphConfig
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.matmul.grouped_matmul import grouped_grad_w, grouped_matmul
from arbcli.kernels.rows.expert_combine import expert_combine, expert_combine_backward
from arbcli.model.initial import projection_std
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import ClampedGate, TernaryGate, TernaryRMSNorm
from arbcli.model.layers.streamed import StreamedTensor, anchor
from arbcli.model.packed import StateModule

WEIGHTS_AT_ONCE = 2**25
"""Weights of experts that are decoded, or have their gradient formed, at the same time."""
BALANCE_UNIT = 1 / 8
"""What one unit of an expert's balance adds to its score."""
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


class ExpertWeight(StreamedTensor):
    """One matrix for each expert, one above the other, each stepped as a matrix of its own."""

    def __init__(
        self, experts: int, out_features: int, in_features: int, config: GraphConfig
    ) -> None:
        about = {"area": "moe_graph", "std": projection_std(in_features), "matrices": experts}
        super().__init__(experts * out_features, in_features, config, **about)
        self.of_one = out_features

    def product(self, x: Tensor, bounds: Tensor, *, transposed: bool = False) -> Tensor:
        """Multiply the slots of each expert, (S, K) sorted, by its matrix, or that transposed."""
        width = self.in_features if transposed else self.of_one
        y = x.new_empty(len(x), width)  # every slot has an expert
        for some in self.gradient_ranges():
            rows = slice(some.start * self.of_one, some.stop * self.of_one)
            w = decode_weight(self.packed.rows(rows), x.dtype).view(len(some), self.of_one, -1)
            w = w.transpose(1, 2) if transposed else w
            grouped_matmul(x, w, bounds[some.start : some.stop + 1], out=y)
        return y

    def hand_on(self, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Form the gradients of some experts at a time, and give these to the sink."""
        x, bounds = sources[0]
        if len(sources) > 1:
            owners = [
                torch.searchsorted(bounds[1:], torch.arange(len(x), device=x.device), right=True)
                for x, bounds in sources
            ]
            owners, order = torch.cat(owners).sort(stable=True)
            x, grad_y = torch.cat([x for x, _ in sources])[order], grad_y[order]
            experts = torch.arange(self.matrices + 1, device=x.device)
            bounds = torch.searchsorted(owners, experts)
        for some in self.gradient_ranges():
            grads = grouped_grad_w(grad_y, x, bounds[some.start : some.stop + 1])
            self.sink(self, grads, some)

    def gradient_ranges(self) -> list[range]:
        """List which of the matrices are decoded, or have their gradients formed, together."""
        together = max(1, WEIGHTS_AT_ONCE // (self.of_one * self.in_features))
        everything = range(self.matrices)
        return [everything[start : start + together] for start in everything[::together]]


class _GroupedLinear(Function):
    """y = before(x) @ w[expert].T for slots sorted by expert; see `layers._Linear`."""

    @staticmethod
    def forward(ctx, x: Tensor, _anchor: Tensor, weight: ExpertWeight, bounds: Tensor, before):
        ctx.weight, ctx.before = weight, before
        ctx.save_for_backward(x, bounds)
        return weight.product(before(x) if before else x, bounds)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        x, bounds = ctx.saved_tensors
        grad_x = ctx.weight.product(grad_y, bounds, transposed=True)
        if ctx.before:
            grad_x, x = ctx.before.backward(grad_x, x)
        ctx.weight.collect((x, bounds), grad_y)
        return grad_x, None, None, None, None


class _Dispatch(Function):
    """Copy positions to their slots; the gradients of a position's slots are added up."""

    @staticmethod
    def forward(ctx, x: Tensor, routing: Routing) -> Tensor:
        ctx.positions = routing.positions
        return x[routing.tokens]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return expert_combine(grad, ctx.positions, None), None


class _Combine(Function):
    """Add up what experts gave for a position, weighted."""

    @staticmethod
    def forward(ctx, values: Tensor, gates: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(values, gates, routing.positions)
        return expert_combine(values, routing.positions, gates)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        values, gates, positions = ctx.saved_tensors
        return *expert_combine_backward(grad_y, values, positions, gates), None


def root_softplus(logits: Tensor) -> Tensor:
    """Compute sqrt(log(1 + exp(z))) of float32 numbers."""
    return functional.softplus(logits.clamp(min=LEAST_LOGIT)).sqrt()


class Gate(StateModule):
    """Choose experts: the scores are of products of a ternary query with a ternary key of each."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__(area="moe_graph")
        self.top_k, self.experts, self.kind = config.moe_top_k, config.experts, config.moe_gate
        self.norm = TernaryRMSNorm(config.gate_dim, config)
        self.keys = TernaryLinear(config.experts, config.gate_dim, config, area="moe_graph")
        if self.kind != "hash":
            self.declare("balance", torch.zeros(config.experts, dtype=torch.int8), "counters")
        self.load = torch.zeros(config.experts, dtype=torch.int64)
        """Slots of each expert in the last step."""
        self.forget()

    def forward(self, query: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn (M, gate_dim) queries into (M, k) int64 experts and their float32 weights.

        What is `chosen` already, as by a hash, is only weighed.
        """
        scores = self.keys(query, self.norm).float()
        unit = BALANCE_UNIT
        if self.kind != "softmax":
            scores, unit = root_softplus(scores), ROOT_BALANCE_UNIT
        if chosen is None:
            chosen = (scores.detach() + self.balance * unit).topk(self.top_k).indices
        if torch.is_grad_enabled():
            every = torch.arange(self.experts, device=chosen.device)
            load = (chosen.flatten() == every[:, None]).sum(dim=1)
            self._load = load if self._load is None else self._load + load
        if self.kind == "softmax":
            return chosen, torch.softmax(scores.gather(1, chosen), dim=1)
        scores = scores.gather(1, chosen)
        return chosen, scores / scores.sum(dim=1, keepdim=True)

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
        self._load: Tensor | None = None

    def fullest(self) -> float:
        """Find the slots of the fullest expert in the last step, over their mean; waits."""
        return float(self.load.max() / self.load.float().mean().clamp(min=1e-9))


def _middle(config: GraphConfig) -> TernaryGate:
    """Make what is between the two matrices of an expert."""
    kind = ClampedGate if config.moe_clamp else TernaryGate
    return kind(config.expert_ffn, config, normalise=True)


class SharedExpert(nn.Module):
    """The expert that every position goes to, besides those that it chooses."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        width, ffn, about = config.expert_dim, config.expert_ffn, {"area": "moe_graph"}
        self.gate_up = TernaryLinear(2 * ffn, width, config, **about)
        self.sub_norm = _middle(config)
        self.down = TernaryLinear(width, ffn, config, **about)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of (M, expert_dim)."""
        return self.down(self.gate_up(x), self.sub_norm)


class Experts(nn.Module):
    """Gated MLPs of which each position uses a few, of inputs and outputs of `expert_dim`."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        width, ffn = config.expert_dim, config.expert_ffn
        self.gate_up = ExpertWeight(config.experts, 2 * ffn, width, config)
        self.sub_norm = _middle(config)
        self.down = ExpertWeight(config.experts, width, ffn, config)
        self.shared = SharedExpert(config) if config.shared_expert else None

    def forward(self, x: Tensor, query: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Send (M, expert_dim) to experts: those `chosen`, or those of (M, gate_dim) queries."""
        chosen, gates = self.gate(query, chosen)
        routing = route(chosen, self.gate.experts)
        slots = _Dispatch.apply(x, routing)
        for weight, before in ((self.gate_up, None), (self.down, self.sub_norm)):
            weight.note_use()
            slots = _GroupedLinear.apply(slots, anchor(x), weight, routing.bounds, before)
        y = _Combine.apply(slots, gates, routing)
        return y + self.shared(x) if self.shared else y
