"""A tiny graph model, parts of it, and how they are compared with their reference."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import torch

from arbcli.base.lazy import imported
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.model import ModelConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.presets import preset
from arbcli.interop.huggingface.modeling_core import PartSpec
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor
from arbcli.verify import parity
from arbcli.verify.reference import attach
from arbcli.verify.subjects import fill_memories as fill_parts

SHAPE = {
    "dim": 40, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8,
    "latent": 24, "rotary": 8, "ngram_rows": 64, "ngram_dim": 16, "key_dim": 8,
    "codes": (4, 8), "code_dim": 36, "code_heads": 2,
    "knowledge": (8, 6), "knowledge_dim": 12, "knowledge_heads": 3, "top_k": 3,
    "experts": 4, "expert_dim": 24, "expert_ffn": 20, "gate_dim": 8, "adapter_rank": 4,
    "edges": (16, 2), "head_ffn": 44, "memory_rows": 64, "max_moe_iters": 3, "memgram": True,
    "moe": True, "graph": True,
}  # fmt: skip
"""Two groups of scales where a row has 36, 40, 44 or 48 weights."""
STD = 0.3
"""Standard deviation of weights, large enough that choices differ between positions."""
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
"""For float32: products of other shapes may add in another order, and processors differ in that."""


def graph_config(**options) -> ModelConfig:
    return preset("arb-tiny", **SHAPE | options)


def spec(**options) -> LayerSpec:
    """Describe where parts of such a model stand."""
    return graph_config(**options).layer_spec(-1)


def plain(
    config: PartConfig, weights: dict[str, torch.Tensor], part: torch.nn.Module, **at
) -> torch.nn.Module:
    """Build a part in plain PyTorch, with float64 weights by name and the integers of `part`."""
    layer_spec, storage = spec(**at), {"group_size": 1, "storage": "digits"}
    about = SimpleNamespace(norm_gain=layer_spec.norm_gain, norm_eps=layer_spec.norm_eps, **storage)
    with torch.device("meta"):
        kind, place = (
            imported(config.code),
            PartSpec(layer_spec.dim, layer_spec.ctx, about, {}, layer_spec.causal),
        )
        made = kind(asdict(config), place, *sizes_of(config))
    attach(made, weights | dict(part.named_buffers()))
    return made


def sizes_of(config: PartConfig) -> tuple[int, ...]:
    """Return the widths of experts in iterations, and of their queries."""
    return (SHAPE["expert_dim"], SHAPE["gate_dim"]) if config.kind == "experts" else ()


def initialised(part: torch.nn.Module) -> torch.nn.Module:
    """Set the weights of a part that is not a whole model."""
    tensors = [tensor for tensor in part.modules() if isinstance(tensor, TernaryTensor)]
    for index, tensor in enumerate(tensors):
        tensor.std = STD
        tensor.spread = 1.0  # tables too: rows of zeros would hide a lot
        tensor.initialise(seed=0, index=index)
    return part


def model(*, recompute=False, **options) -> LanguageModel:
    """Make a model whose integer memories hold something."""
    lm = LanguageModel(graph_config(**options), torch.float32, recompute=recompute)
    for tensor in lm.weights().values():
        tensor.spread = 1.0
    lm.initialise(0)
    fill_memories(lm)
    return lm


def fill_memories(part: torch.nn.Module) -> None:
    fill_parts(part, math.prod(SHAPE["codes"]))


def text(rows=2, length=6, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, 101, (rows, length), generator=generator)


def normal(*shape: int, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def collect(part: torch.nn.Module) -> dict[str, list]:
    """Make every weight hand its (gradient, where) to a list of its own."""
    grads: dict[str, list] = {}
    for name, tensor in part.named_modules():
        if isinstance(tensor, TernaryTensor) and not tensor.frozen:
            grads[name] = []
            tensor.sink = lambda _, grad, where=None, name=name: grads[name].append((grad, where))
    return grads


def decoded(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Decode all weights by their names, less `.weight`, as float64 leaves."""
    return {
        name.removesuffix(".weight"): tensor.weight(torch.float32).double().requires_grad_()
        for name, tensor in part.named_modules()
        if isinstance(tensor, TernaryTensor)
    }


def whole_gradient(tensor: TernaryTensor, handed: list) -> torch.Tensor:
    """Put together what a sink was given in one backward."""
    return sum(parity.dense_gradient(tensor, *each) for each in handed)


def times(handed: list) -> int:
    """Count the matrices that a sink was given the gradient of."""
    return sum(len(where) if isinstance(where, range) else 1 for _, where in handed)


def assert_same(part, inputs, run, reference) -> None:
    """Compare a result, and gradients of inputs and weights, with autograd's of a reference.

    Args:
        part: the module; its weights are handed to the reference by name.
        inputs: tensors; those of floats need gradients.
        run: from the inputs to one tensor.
        reference: from the weights and the inputs to the same, in float64.
    """
    handed = collect(part)
    ours = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = run(*ours)
    weights = decoded(part)
    twins = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    expected = reference(weights, *twins)
    torch.testing.assert_close(y.double(), expected, **CLOSE)
    grad_y = normal(*y.shape, seed=9)
    y.backward(grad_y)
    expected.backward(grad_y.double())
    for x, twin in zip(ours, twins, strict=True):
        if x.is_floating_point():
            torch.testing.assert_close(x.grad.double(), twin.grad, **CLOSE)
    modules = dict(part.named_modules())
    for name, grads in handed.items():
        tensor, twin = modules[name], weights[name.removesuffix(".weight")]
        assert times(grads) == tensor.matrices, name
        got = whole_gradient(tensor, grads).double()
        assert twin.grad is not None, name
        error = (got - twin.grad).norm() / twin.grad.norm().clamp(min=1e-6)
        assert error < 1e-4, name
