"""Weights before the first step: as wide as they declare, and new each time."""

import itertools

import pytest
import torch
from made_runs import model_of
from states import assert_same, state_of

from arbcli.config.presets import preset
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.build import build_model
from arbcli.model.layers.table import TableWeight
from arbcli.model.packed import TernaryTensor

DENSE = {"preset": "tiny", "dim": 144, "layers": 3, "heads": 3, "ffn": 200, "ctx": 16}
NONZERO = {"moment": (0.6846, 0.0422), "carry": (0.6800, 0.0392), "nibble": (0.6682, 0.0321)}
"""Shares of trits that are not zero, of matrices and of tables: of a normal distribution what is
beyond 32.5 of 80 and of 16, 16.5 of 40 and of 8, or 7.5 of 17.5 and of 3.5, in steps of z."""


def build(seed: int = 0, **options):
    return build_model(model_of(options), torch.float32, seed=seed)


@pytest.mark.parametrize("weights", ["ternary", "float", "ste"])
def test_built_model_has_the_weights_of_its_seed(weights):
    """Whatever the default device is: that of a GPU while a model is built on one."""
    config = preset("tiny", dim=40, layers=1, heads=2, ffn=56, ctx=24, weights=weights)
    for options, seed in (({}, 0), ({"seed": 7}, 7)):
        expected = build_model(config, torch.float32, seed=None)
        with torch.device("meta"):
            expected.initialise(seed)
        built = build_model(config, torch.float32, **options)
        assert_same(built.state_dict(), expected.state_dict())


def test_module_that_declares_no_order_of_its_weights_is_refused():
    model = build_model(preset("tiny"), torch.float32)
    model.add_module("more", torch.nn.ModuleDict({"a": model.norm, "b": model.embedding}))
    with pytest.raises(ValueError, match="`draws` of `ModuleDict` lacks"):
        model.initialise(0)


def is_norm(name: str) -> bool:
    return "norm" in name


@pytest.mark.parametrize(
    ("shape", "rule"), [("dense", "moment"), ("dense", "nibble"), ("graph", "carry")]
)
def test_packed_weights_spread_as_they_declare(shape, rule, small_graph):
    """In size to the rounding to bfloat16, in the share that is not zero to the sampling error.

    `old_configs.json` pins the declarations.
    """
    options = DENSE if shape == "dense" else small_graph | {"memgram": True}
    for name, tensor in build(rule=rule, **options).weights().items():
        weight = tensor.weight(torch.float32)
        if is_norm(name):
            assert (weight == 1).all(), name
            continue
        full, of_tables = NONZERO[rule]
        share = of_tables if isinstance(tensor, TableWeight) else full
        size = tensor.std / full**0.5
        assert weight.abs().unique()[-1].item() == pytest.approx(size, rel=0.008), name
        assert len(weight.abs().unique()) == 2, name
        error = (share * (1 - share) / weight.numel()) ** 0.5
        assert (weight != 0).float().mean().item() == pytest.approx(share, abs=5 * error), name
        assert abs(weight.sign().mean().item()) < 5 * (share / weight.numel()) ** 0.5, name


def values(part) -> torch.Tensor:
    """Read what was drawn: z of a packed tensor, else the weights."""
    if not isinstance(part, TernaryTensor):
        return part.latent.detach().double()
    (digit, _), *_ = part.rule.digits(part.state).values()
    return unpack_trits(part.trits, part.in_features).double() * part.rule.radix + digit


@pytest.mark.parametrize("kind", ["ternary", "float", "graph"])
def test_two_seeds_differ_everywhere_and_no_two_tensors_are_alike(kind, small_graph):
    options = small_graph | {"memgram": True} if kind == "graph" else DENSE | {"weights": kind}
    drawn = {
        (name, seed): values(part)
        for seed in (0, 1)
        for name, part in build(seed, **options).weights().items()
        if not is_norm(name)
    }
    for one, other in itertools.combinations(drawn, 2):
        rows, columns = map(min, drawn[one].shape, drawn[other].shape)
        pair = torch.stack([drawn[name][:rows, :columns].flatten() for name in (one, other)])
        # within five standard errors of independent values
        assert torch.corrcoef(pair)[0, 1].abs() < 5 / (rows * columns) ** 0.5, (one, other)


def tensor(rows: int, columns: int, std: float = 0.1, **options) -> TernaryTensor:
    spec = preset("tiny", **options).layer_spec()
    return TernaryTensor(rows, columns, spec, area="mlp", std=std)


@pytest.mark.parametrize(("std", "octave"), [(0.1, -3), (0.075, -3), (0.07, -4), (1.0, 0)])
def test_scales_of_whole_octaves_begin_at_the_nearest(std, octave):
    state = tensor(16, 165, std, rule="votes")
    state.initialise(0, 0)
    assert state.exponent.unique().tolist() == [octave]


def test_initialise_does_not_depend_on_the_block_size(monkeypatch):
    first, second = tensor(70, 165), tensor(70, 165)
    first.initialise(seed=5, index=2)
    monkeypatch.setattr(
        "arbcli.model.packed.row_chunks", lambda m, _: (slice(i, i + 1) for i in range(len(m)))
    )
    second.initialise(seed=5, index=2)
    assert_same(state_of(first), state_of(second))
