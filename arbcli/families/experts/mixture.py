"""A mixture of experts with fixed shapes, so that routing never synchronises with the device.

Each position is routed to its `moe_top_k` best experts. The pairs of position and expert are sorted
by expert on the device, and multiplied in one grouped product. The load is balanced by a small
integer for each expert that is added to its score for the selection, but not for the weights.
Source: L. Wang et al., "Auxiliary-Loss-Free Load Balancing", https://arxiv.org/abs/2408.15664.

The kind of gate determines how the product z of query and key is used:

| gate | score s of an expert | selection | weights |
|---|---|---|---|
| `softmax` | z | largest s + balance | softmax of the selected s |
| `softplus` | sqrt(log(1 + exp(z))) | largest s + balance | s / sum of the selected s |
| `hash` | sqrt(log(1 + exp(z))) | by the text: see `hashed_experts` | s / sum of the selected s |

The square root grows slowly, so that the balance can compensate for any product, and weights do not
vanish.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.experts.float_weight import FloatExpertWeight
from arbcli.families.experts.hashed import hashed_experts
from arbcli.families.experts.kernels.expert_combine import expert_combine, expert_combine_backward
from arbcli.families.experts.weight import ExpertWeight
from arbcli.kernels.norm.rms_norm import FEW_ROWS
from arbcli.model.initial import output_std
from arbcli.model.layers.compiled import Findable, KeepsInputs, operator
from arbcli.model.layers.kinds import layers_for
from arbcli.model.packed import recomputing
from arbcli.model.packed_model import StepMemory
from arbcli.model.parts.base import BlockInputs, BlockOutput, Part, map_texts

if TYPE_CHECKING:
    from arbcli.model.state import PositionCounter

BALANCE_UNIT = 1 / 8
"""Score of one unit of balance with the gate `softmax`."""
ROOT_BALANCE_UNIT = 1 / 32
"""Score of one unit of balance with roots, whose slope at z = 0 is 0.3; suffices up to z = 16."""
MAX_BALANCE = 127
MIN_LOGIT = -40.0
"""Lower clamp of logits before the root, which avoids infinite gradients."""


class Routing(NamedTuple):
    """The assignment of positions to experts, in S = M * k slots sorted by expert."""

    positions: Tensor
    """(M, k) int64, slots of each position."""
    tokens: Tensor
    """(S,) int64, position of each slot."""
    bounds: Tensor
    """(E + 1,) int64: slots of expert e are bounds[e] to bounds[e + 1] - 1."""


def route(choice: Tensor, experts: int) -> Routing:
    """Sort the slots of selected experts, (M, k) int64, by expert."""
    sorted_choice, order = choice.flatten().sort(stable=True)
    slots = torch.arange(len(order), device=order.device)
    positions = torch.empty_like(order).scatter_(0, order, slots)
    bounds = torch.searchsorted(sorted_choice, torch.arange(experts + 1, device=order.device))
    return Routing(positions.view(choice.shape), order // choice.shape[1], bounds)


class _Dispatch(Function):
    """Copy positions to their slots; the backward sums the gradients of a position's slots."""

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


class _Combine(KeepsInputs):
    """Sum the weighted outputs of each position's experts."""

    @staticmethod
    def forward(values: Tensor, positions: Tensor, gates: Tensor) -> Tensor:
        return expert_combine(values, positions, gates)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grad_values, grad_gates = expert_combine_backward(grad_y, *ctx.saved_tensors)
        return grad_values, None, grad_gates


_dispatch, _combine = operator(_Dispatch), operator(_Combine)


def root_softplus(logits: Tensor) -> Tensor:
    """Compute sqrt(log(1 + exp(z))) of float32 logits z of any shape."""
    return functional.softplus(logits.clamp(min=MIN_LOGIT)).sqrt()


class Gate(Findable, StepMemory):
    """Selects experts by the products of a query with a ternary key of each expert.

    Args:
        config: configuration of the experts.
        width: width of a query.
        spec: storage settings and width of the stage.
        area: parameter group of the tensors.
    """

    draws = ("norm", "keys")
    balance: Tensor

    def __init__(self, config: ExpertsConfig, width: int, spec: LayerSpec, area: str) -> None:
        super().__init__(area=area)
        parts = layers_for(spec)
        self.top_k, self.experts, self.kind = config.top_k, config.experts, config.gate
        self.norm = parts.norm(width, spec)
        self.keys = parts.linear(config.experts, width, spec, area=area)
        if self.kind != "hash":
            self.declare("balance", torch.zeros(config.experts, dtype=torch.int8), "counters")
        self.load = torch.zeros(config.experts, dtype=torch.int64)
        """Number of slots of each expert in the last step."""

    def forward(
        self, query: Tensor, chosen: Tensor | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Select experts, (M, k) int64, and compute their float32 weights.

        Args:
            query: (M, width), query of each position.
            chosen: (M, k) int64, experts that are already selected, as by a hash; else None.
            valid: (M,) bool mask of the positions that count as load; None for all.
        """
        return self.weigh(self.keys(query, self.norm).float(), chosen, valid)

    def weigh(
        self, scores: Tensor, chosen: Tensor | None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Select experts from products of queries and keys, (M, E) float32: see `forward`."""
        unit = BALANCE_UNIT
        if self.kind != "softmax":
            scores, unit = root_softplus(scores), ROOT_BALANCE_UNIT
        if chosen is None:
            chosen = (scores.detach() + self.balance * unit).topk(self.top_k).indices
        if torch.is_grad_enabled():
            chosen = _counted(chosen, valid, self)
        scores = scores.gather(1, chosen)
        # the weight of one expert is 1; of s / s the keys would be stepped by rounding errors
        if self.kind == "softmax" or self.top_k == 1:
            return chosen, torch.softmax(scores, dim=1)
        return chosen, scores / scores.sum(dim=1, keepdim=True)

    def count(self, chosen: Tensor, valid: Tensor | None) -> None:
        """Count the load of selected experts, (M, k), without positions that are not `valid`."""
        if recomputing():
            return
        every = torch.arange(self.experts, device=chosen.device)
        counted = chosen if valid is None else chosen.masked_fill(~valid[:, None], -1)
        self.add("load", (counted.flatten() == every[:, None]).sum(dim=1))

    @property
    def key_tensor(self) -> Tensor:
        """The load, (E,) int64."""
        return self.load

    @torch.no_grad()
    def finish_step(self) -> None:
        """Decrement the balance of experts with more than the mean load, and increment others."""
        if "load" in self.sums:
            load = self.sums["load"]
            self.load.copy_(load)
            if self.kind != "hash":
                moved = self.balance + torch.sign(load.sum() - load * self.experts)
                self.balance.copy_(moved.clamp_(-MAX_BALANCE, MAX_BALANCE))
        self.forget()

    def gauges(self) -> dict[str, float]:
        """Return the load imbalance; synchronises with the device.

        Returns:
            fullest_expert: maximum number of slots of an expert, relative to the mean.
        """
        return {"fullest_expert": float(self.load.max() / self.load.float().mean().clamp(min=1e-9))}


def _count(chosen: Tensor, valid: Tensor | None, gate: Gate) -> Tensor:
    gate.count(chosen, valid)
    return chosen


_counted = operator(_count, lambda chosen, *_: chosen)


class SharedExpert(nn.Module):
    """The expert of all positions, in addition to the selected ones."""

    draws = ("gate_up", "sub_norm", "down")

    def __init__(
        self, config: ExpertsConfig, dim: int, spec: LayerSpec, *, area: str, std: float | None
    ) -> None:
        super().__init__()
        parts = layers_for(spec)
        self.gate_up = parts.linear(2 * config.width, dim, spec, area=area)
        self.sub_norm = _gate_and_norm(config, spec)
        self.down = parts.linear(dim, config.width, spec, area=area, std=std)

    def forward(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Apply the expert to (M, dim)."""
        return self.down(self.gate_up(x, norm), self.sub_norm)


def _gate_and_norm(config: ExpertsConfig, spec: LayerSpec) -> nn.Module:
    """Build the gate and norm between the two matrices of an expert."""
    parts = layers_for(spec)
    kind = parts.clamped_gate if config.clamp else parts.gate
    return kind(config.width, spec, normalise=True)


def _norm_row_by_row(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise in batches of few rows, for which the kernel sums each row in the same order."""
    return torch.cat([norm(rows) for rows in x.split(FEW_ROWS)])


class Experts(Part):
    """A mixture of experts that are gated MLPs.

    As a channel mixer it reads and writes the stream, which is also the query of the gate.

    Args:
        config: configuration of the experts.
        spec: storage settings and width of the stage.
        dim: width of inputs and outputs; None is that of the stream.
        query: width of the gate's queries; None is that of the stream.
        area: parameter group of the tensors.
    """

    draws = ("gate", "gate_up", "sub_norm", "down", "shared")
    name = "experts"
    steps_texts = True

    def __init__(
        self,
        config: ExpertsConfig,
        spec: LayerSpec,
        dim: int | None = None,
        query: int | None = None,
        area: str = "experts",
    ) -> None:
        super().__init__()
        expert_weight: Any = ExpertWeight if spec.weights == "ternary" else FloatExpertWeight
        width, number = dim or spec.dim, config.experts
        # outputs into the residual stream have a small initial scale
        std = output_std(config.width, spec.depth) if dim is None else None
        self.gate = Gate(config, query or spec.dim, spec, area)
        self.gate_up: Any = expert_weight(number, 2 * config.width, width, spec, area=area)
        self.sub_norm = _gate_and_norm(config, spec)
        self.down: Any = expert_weight(number, width, config.width, spec, area=area, std=std)
        self.shared = None
        if config.shared:
            self.shared = SharedExpert(config, width, spec, area=area, std=std)

    def new_state(self, clock: "PositionCounter") -> None:
        """Return None, as positions are independent."""

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: None = None,
    ) -> BlockOutput:
        """Apply the experts to (B, T, D): see `Part.forward`."""
        x = x if added is None else x + added
        rows, valid = x.flatten(0, 1), inputs.valid if inputs else None
        chosen = self.choose_by_hash(inputs)
        valid = None if valid is None else valid.flatten()
        return BlockOutput(x, self.mix(rows, rows, chosen, norm, valid).view(x.shape))

    @torch.no_grad()
    def step_texts(self, x: Tensor, norm: nn.Module, inputs: BlockInputs) -> Tensor:
        """Apply the experts to one position of each text: see `Part.step_texts`."""
        rows = x.flatten(0, 1)
        scores = self.gate.keys.fused(rows, normalise=True).float()
        chosen, gates = self.gate.weigh(scores, self.choose_by_hash(inputs))
        routing = route(chosen, self.gate.experts)
        slots = _norm_row_by_row(norm, rows[routing.tokens])
        slots = self.gate_up.product(slots, routing.bounds, apart=True)
        slots = _norm_row_by_row(self.sub_norm, slots)
        slots = self.down.product(slots, routing.bounds, apart=True)
        y = expert_combine(slots, routing.positions, gates)
        if self.shared:
            shared = self.shared
            y = y + map_texts(lambda row: shared(row, norm), rows)
        return y.view(x.shape)

    def choose_by_hash(self, inputs: BlockInputs | None) -> Tensor | None:
        """Select experts by a hash of the text, (M, k) int64; None if the gate selects."""
        if self.gate.kind != "hash":
            return None
        if inputs is None or inputs.grams is None:
            raise ValueError("experts that are selected by the text need its n-grams")
        return hashed_experts(inputs.grams, self.gate.experts, self.gate.top_k)

    def mix(
        self,
        x: Tensor,
        query: Tensor,
        chosen: Tensor | None = None,
        norm: nn.Module | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Apply the experts to (M, dim), and return the weighted sum.

        Args:
            x: (M, dim), inputs of the experts.
            query: (M, query width), queries of the gate.
            chosen: (M, k) int64, selected experts; None lets the gate select.
            norm: norm of the inputs.
            valid: (M,) bool mask of the positions; None for all.
        """
        chosen, gates = self.gate(query, chosen, valid)
        routing = route(chosen, self.gate.experts)
        slots = _dispatch(x, routing.tokens, routing.positions)
        slots = self.gate_up.multiply(slots, routing.bounds, norm)
        slots = self.down.multiply(slots, routing.bounds, self.sub_norm)
        y = _combine(slots, routing.positions, gates)
        return y + self.shared(x, norm) if self.shared else y
