"""Modules whose parameters are packed tensors: classes of torch and of others, with integers.

The class of a converted module is a subclass of its class, in which each packed parameter is a
property that decodes. Code that reads `module.weight` therefore works, and gradients of such reads
reach the optimizer. Linear layers, embeddings and experts do not decode that way: their `forward`
is replaced, and multiplies by packed weights.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from arbcli.base.errors import ArbError
from arbcli.nn.storage import DEFAULT, Storage, new_packed
from arbcli.nn.weights import DTYPES, Anchored, ExpertStack, Matrix, MatrixRows, Symbols, look_up

SUFFIX = "_packed"
"""End of the name of a packed tensor in its module, after the name of the parameter."""


_SIZES = "num_embeddings", "embedding_dim", "in_features", "out_features"


class IntegerModule(nn.Module):
    """Base of modules with packed parameters."""

    _packed: dict[str, Anchored | MatrixRows]
    """Packed tensors by the name of the parameter; those of tied layers are registered once."""
    _float_class: "type[nn.Module] | None" = None
    """Class of the module before its conversion."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse to replace integers."""
        if name in self.__dict__.get("_packed", {}):
            raise _not_assignable(self, name)
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change the size of integers."""
        if name in _SIZES and self.__dict__.get("_packed"):
            raise _not_assignable(self, name)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles of a derived class by the class that it was derived from."""
        if "_float_class" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        arguments = self._float_class, tuple(sorted(self._packed)), isinstance(self, Experts)
        return _blank, arguments, self.__dict__

    @classmethod
    def from_float(cls, module: Any, storage: Storage = DEFAULT) -> Any:
        """Round a float module to a new one with integers.

        Raises:
            ArbError: it has no parameters of its own, or one cannot be integers.
        """
        return pack(copy.deepcopy(module), storage)

    def to_float(self) -> Any:
        """Decode to a new module of the class before its conversion."""
        assert self._float_class is not None, "a `Vector` has its own"
        module = self._float_class.__new__(self._float_class)
        content = {name: value for name, value in self.__dict__.items() if name != "_packed"}
        values = {
            name: nn.Parameter(packed.decoded().clone(), packed.anchor.requires_grad)
            for name, packed in self._packed.items()
        }
        children = {name + SUFFIX for name in values}
        others = {name: part for name, part in self._modules.items() if name not in children}
        module.__dict__.update(content | {"_modules": others})
        module._parameters = {**self._parameters, **values}
        return module


def _blank(kind: Any, names: tuple[str, ...], experts: bool) -> nn.Module:
    derived = integer_class(kind, names, experts)
    return derived.__new__(derived)


def _not_assignable(module: nn.Module, name: str) -> ArbError:
    return ArbError(
        f"`{type(module).__name__}.{name}` cannot be assigned: the module stores integers",
        "change the model before `arbcli.to_integers`",
    )


def _reader(name: str) -> property:
    """Return a property for a parameter that may be packed."""

    def read(self: nn.Module) -> Tensor | None:
        packed = self.__dict__.get("_packed", {})
        if name in packed:
            return packed[name].read()
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(name)  # `nn.Module.__getattr__` continues

    def assign(self: nn.Module, value: Any) -> None:
        if name in self.__dict__.get("_packed", {}):
            raise _not_assignable(self, name)
        self.__dict__[name] = value  # as hooks do that compute it from other parameters

    return property(read, assign)


class Linear(IntegerModule, nn.Linear):
    """y = x @ w.T + b with integer weights.

    Weights are initialised as in `torch.nn.Linear`.

    Args:
        args, kwargs: arguments of `torch.nn.Linear`. `dtype`, bfloat16 or float32, is the dtype of
            biases and of the decoded `weight`.
        storage: rule, scale type and direction: see `Storage`.
    """

    def __init__(self, *args: Any, storage: Storage = DEFAULT, **kwargs: Any) -> None:
        nn.Linear.__init__(self, *args, **kwargs)
        pack(self, storage)

    _float_class = nn.Linear
    weight = _reader("weight")
    bias = _reader("bias")

    def forward(self, input: Tensor) -> Tensor:
        """Multiply (..., K) bfloat16 or float32 activations to (..., N) of their dtype."""
        packed = self._packed.get("weight")
        if not isinstance(packed, Matrix | MatrixRows | Symbols):
            return super().forward(input)
        y = packed.product(input)
        bias = self.bias
        return y if bias is None else y + bias.to(y.dtype)


class Embedding(IntegerModule, nn.Embedding):
    """Rows of a table of integer weights.

    Weights are initialised as in `torch.nn.Embedding`.

    Args:
        args, kwargs: arguments of `torch.nn.Embedding`. `dtype`, bfloat16 or float32, is the dtype
            of the result.
        storage: rule, scale type and direction: see `Storage`.
    """

    def __init__(self, *args: Any, storage: Storage = DEFAULT, **kwargs: Any) -> None:
        nn.Embedding.__init__(self, *args, **kwargs)
        pack(self, storage)

    _float_class = nn.Embedding
    weight = _reader("weight")

    def forward(self, input: Tensor) -> Tensor:
        """Look up (...) integers: (..., D)."""
        packed = self._packed.get("weight")
        if packed is None:
            return super().forward(input)
        return look_up(packed, input, self.padding_idx)


class Vector(IntegerModule):
    """A vector of integers with a scale each, such as gains and biases.

    Args:
        values: (n,) initial values.
        storage: rule and direction: see `Storage`.
    """

    def __init__(self, values: Tensor, storage: Storage = DEFAULT) -> None:
        super().__init__()
        self.register_parameter("value", nn.Parameter(values.detach()))
        pack(self, storage)

    value = _reader("value")

    @classmethod
    def from_float(cls, module: Tensor, storage: Storage = DEFAULT) -> Any:
        """Round values, (n,), to a new vector."""
        return cls(module, storage)

    def to_float(self) -> nn.Parameter:
        """Decode to a parameter."""
        return nn.Parameter(self._packed["value"].decoded())

    def forward(self) -> Tensor:
        """Decode to (n,) of the dtype of the initial values; differentiable."""
        return self.value


class _Conv1D(IntegerModule):
    """The linear layer of GPT-2 in Transformers, whose weight is (K, N)."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., K) to (..., N)."""
        packed = self._packed.get("weight")
        if not isinstance(packed, Matrix):
            return super().forward(x)
        y = packed.product(x)
        return y + self.bias.to(y.dtype)


class Experts(IntegerModule):
    """Experts of a mixture, of which each is an MLP with a gate.

    Slots are sorted by expert and multiplied in grouped products. The module is also the forward of
    the experts of models of Transformers.

    Args:
        gate_up: (E, 2 I, D), gate and up projections of E experts.
        down: (E, D, I), their output projections.
        act_fn: activation of the gate.
        storage: rule and scale type: see `Storage`.
    """

    act_fn: Callable[[Tensor], Tensor]

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        act_fn: Callable[[Tensor], Tensor] = nn.functional.silu,
        storage: Storage = DEFAULT,
    ) -> None:
        super().__init__()
        self.register_parameter("gate_up_proj", nn.Parameter(gate_up.detach()))
        self.register_parameter("down_proj", nn.Parameter(down.detach()))
        self.act_fn = act_fn
        pack(self, storage)

    gate_up_proj = _reader("gate_up_proj")
    down_proj = _reader("down_proj")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add the results of the chosen experts.

        Args:
            hidden_states: (M, D).
            top_k_index: (M, k) integers, the chosen experts.
            top_k_weights: (M, k), their weights.

        Returns:
            (M, D).
        """
        gate_up, down = (self._packed.get(name) for name in ("gate_up_proj", "down_proj"))
        if not isinstance(gate_up, ExpertStack) or not isinstance(down, ExpertStack):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return _mix(hidden_states, top_k_index, top_k_weights, gate_up, down, self.act_fn)


@torch.compiler.disable
def _mix(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    act: Callable,
) -> Tensor:
    count, experts_per_row = chosen.shape
    owners, order = chosen.reshape(-1).sort(stable=True)
    bounds = torch.searchsorted(owners, torch.arange(gate_up.matrices + 1, device=x.device))
    # a permutation of repeated rows: its backward adds in a fixed order
    slots = x[:, None].expand(-1, experts_per_row, -1).reshape(len(order), x.shape[1])[order]
    gate, up = gate_up.multiply_slots(slots, bounds).chunk(2, dim=-1)
    y = down.multiply_slots((act(gate) * up).contiguous(), bounds)
    y = y[order.argsort()].view(count, experts_per_row, y.shape[1]) * shares[..., None]
    return y.sum(dim=1).to(x.dtype)


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def are_experts(module: nn.Module) -> bool:
    """Return whether a module has stacked experts as `Experts` computes them."""
    parts = {name: part for name, part in module._parameters.items() if part is not None}
    if {*parts} != {"gate_up_proj", "down_proj"} or not callable(getattr(module, "act_fn", None)):
        return False
    gate_up, down = parts["gate_up_proj"], parts["down_proj"]
    plain = not getattr(module, "is_transposed", False) and not hasattr(module, "_apply_gate_")
    return plain and gate_up.ndim == down.ndim == 3 and gate_up.shape == (
        len(down), 2 * down.shape[2], down.shape[1]
    )  # fmt: skip


def role(module: nn.Module, name: str) -> str:
    """Return how a module uses a parameter: `product`, `lookup`, `experts` or `read`."""
    if name == "weight" and (isinstance(module, nn.Linear) or _is_conv1d(type(module))):
        return "product"
    if name == "weight" and isinstance(module, nn.Embedding):
        return "lookup"
    return "experts" if are_experts(module) else "read"


def is_transposed(module: nn.Module, name: str) -> bool:
    """Return whether a parameter is the transpose of a packed matrix."""
    return name == "weight" and _is_conv1d(type(module))


@cache
def integer_class(kind: Any, names: tuple[str, ...], experts: bool) -> Any:
    """Derive the class of modules of a class with packed parameters of these names.

    Args:
        kind: class of the float module.
        names: names of the parameters.
        experts: whether they are those of `Experts`.
    """
    usual = {nn.Linear: Linear, nn.Embedding: Embedding}.get(kind)
    if usual is not None and {"weight", "bias"}.issuperset(names):
        return usual
    bases: tuple[type, ...] = (kind, IntegerModule)
    if usual is not None:
        bases = (usual,)
    elif _is_conv1d(kind):
        bases = (_Conv1D, kind)
    elif issubclass(kind, nn.Linear | nn.Embedding):
        bases = (kind, Linear if issubclass(kind, nn.Linear) else Embedding)
    elif experts:
        bases = (Experts, kind)
    content: dict[str, Any] = {name: _reader(name) for name in names}
    content |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "_float_class": kind}
    return type(kind.__name__, bases, content)


def set_packed(
    module: nn.Module, name: str, packed: Anchored | MatrixRows, registered: Anchored | None
) -> None:
    """Replace a parameter of a module by a packed tensor.

    Args:
        module: the module; `set_integer_class` follows when all its parameters are replaced.
        name: name of the parameter.
        packed: the tensor, or rows of one.
        registered: tensor that becomes a part of the module's state; None if it is another's.
    """
    del module._parameters[name]
    module.__dict__.setdefault("_packed", {})[name] = packed
    if registered is not None:
        module._modules[name + SUFFIX] = registered


def set_integer_class(module: nn.Module, experts: bool) -> None:
    """Change the class of a module with packed parameters to its integer class."""
    if not isinstance(module, IntegerModule):
        kind: Any = type(module)
        module.__class__ = integer_class(kind, tuple(sorted(module.__dict__["_packed"])), experts)


def unsupported(module: nn.Module, value: nn.Parameter) -> str | None:
    """Return why a parameter of a module cannot be integers; None if it can."""
    if nn.parameter.is_lazy(value) or value.is_meta:
        return "it has no values yet"
    if value.dtype not in DTYPES:
        return f"it is {str(value.dtype).removeprefix('torch.')}, and not bfloat16 or float32"
    if value.layout != torch.strided:
        return "it is sparse"
    if not (value.abs() < 1 << 32).all():  # near the largest scale
        return "it has a number that is not finite, or is 2**32 or more"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"{type(module).__name__} reads its weights in its own kernel"
    if isinstance(module, parametrize.ParametrizationList):
        return "it is parametrized"
    if isinstance(module, torch.jit.ScriptModule):
        return "its module is compiled by `torch.jit`"
    tables = nn.Embedding | nn.EmbeddingBag
    if isinstance(module, tables) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        return "its embedding has `max_norm`, `scale_grad_by_freq` or `sparse`"
    return None


def pack(module: Any, storage: Storage) -> Any:
    """Round all parameters of a module, but not of its children, to integers, in place.

    Raises:
        ArbError: there are none, or one cannot be integers.
    """
    values = {name: value for name, value in module._parameters.items() if value is not None}
    if not values:
        raise ArbError(
            f"`{type(module).__name__}` has no float weights of its own",
            "`arbcli.to_integers` converts the modules in it",
        )
    for name, value in values.items():
        if problem := unsupported(module, value):
            raise ArbError(
                f"`{name}` cannot be converted to integers: {problem}",
                "leave the module in floats, or change it first",
            )
    experts = are_experts(module)
    roles_of = {name: frozenset({role(module, name)}) for name in values}
    for name, value in values.items():
        roles = roles_of[name]
        dim = value.shape[-1] if value.ndim else 1
        packed = new_packed(value, roles, storage, dim=dim, transposed=is_transposed(module, name))
        packed.round(value.detach())
        set_packed(module, name, packed, packed)
    set_integer_class(module, experts)
    return module
