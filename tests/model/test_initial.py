"""What weights are before the first step: as wide as the table says by kind, and new each time."""

import itertools

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.build import build_model
from arbcli.model.packed import TernaryTensor

DENSE = {"preset": "tiny", "dim": 144, "layers": 3, "heads": 3, "ffn": 200, "ctx": 16}
NONZERO = {"moment": (0.6846, 0.0422), "carry": (0.6800, 0.0392), "nibble": (0.6682, 0.0321)}
"""Shares of trits that are not zero, of matrices and of tables: of a normal distribution what is
beyond 32.5 of 80 and of 16, 16.5 of 40 and of 8, or 7.5 of 17.5 and of 3.5, in steps of z."""

DENSE_STDS = {
    "embedding": 1.0,
    "attention.qkv": 0.083333,  # 1 / sqrt(144)
    "mlp.gate_up": 0.083333,
    "attention.output": 0.034021,  # 1 / sqrt(144 * 2 * 3)
    "mlp.output": 0.028868,  # 1 / sqrt(200 * 2 * 3)
    "head": 0.083333,
}
GRAPH_STDS = {
    "embedding": 1.0,
    "table": 0.1,
    "sequencer.projection": 0.1,
    "attention.query_down": 0.1,
    "attention.up": 0.1,
    "mlp.gate_up": 0.1,
    "byte_mlp.gate_up": 0.1,
    "codebook.query": 0.1,
    "knowledge.query": 0.1,
    "left": 0.1,
    "right": 0.1,
    "moe_graph.inward": 0.1,
    "experts.gate.keys": 0.1,
    "experts.gate_up": 0.1,
    "experts.down": 0.1,
    "router.scores": 0.1,
    "attention.output": 0.05,  # 0.1 / sqrt(2 * 2)
    "mlp.output": 0.05,
    "byte_mlp.output": 0.05,
    "memgram.output": 0.05,
    "codebook.output": 0.05,
    "knowledge.output": 0.05,
    "moe_graph.output": 0.05,
    "moe_graph.message": 0.05,
    "adapters": 0.05,
    "head": 0.176777,  # 1 / sqrt(32)
}
"""By the end of a name, or by a part of it; of 32 inputs at most, and two layers."""
INNER = {
    "blocks": {
        "attention.qkv": 0.083333, "mlp.gate_up": 0.083333,  # 1 / sqrt(144)
        "attention.output": 0.034021, "mlp.output": 0.028868,  # 1 / sqrt(144 * 6), 200 * 6
    },
    "inward": 0.091287,  # 1 / sqrt(120)
    "outward": 0.083333,
    "residual": 0.0,
    "router.query_key": 0.0,
    "embedding": 1.0,
    "head": 0.091287,
}  # fmt: skip
OTHERS = {
    "hnet": (
        {"outer_blocks": "attention"},
        INNER | {
            "coders": {
                "attention.qkv": 0.091287, "mlp.gate_up": 0.091287,
                "attention.output": 0.045644, "mlp.output": 0.043853,  # 120 * 4, 130 * 4
            },
        },
    ),
    "mamba": (
        {"outer_blocks": "mamba"},
        INNER | {
            "coders": {
                "projection": 0.091287, "taps": 0.5,
                "output": 0.045644,  # 1 / sqrt(240 * 2): one of them in each of two blocks
                "rate": (0.001, 1.791759, 2.397895, 2.772589),  # log of 1, 6, 11 and 16
                "bias": (-6.907255, -5.369950, -3.827251, -2.252168),  # dt of 0.001 to 0.1
                "skip": (1.0,) * 4,
            },
        },
    ),
    "compressed": (
        {},
        {
            "embedding": 1.0, "projection": 0.083333, "beta": 0.5, "sink": (1.0,) * 4,
            "indexer.query": 0.083333, "indexer.key": 0.1,  # of 80 inputs
            "attention.output": 0.039528,  # 1 / sqrt(160 * 4)
            "mlp.gate_up": 0.083333, "mlp.output": 0.035355, "head": 0.083333,
        },
    ),
    "streams": (
        {},
        DENSE_STDS | {
            "projection": 0.0,
            "attention_streams.bias": (2.0, -2.0, 2.0, 2.0, 2.0, -2.0, -2.0, 2.0),
            "mlp_streams.bias": (-2.0, 2.0, 2.0, 2.0, 2.0, -2.0, -2.0, 2.0),
        },
    ),
}  # fmt: skip
"""Options and standard deviations of models of other kinds; numbers that are given, as tuples."""
SHAPES = {
    "hnet": {
        "preset": "hnet-tiny", "dim": 144, "layers": 3, "heads": 3, "ffn": 200, "ctx": 32,
        "outer_dim": 120, "outer_layers": 2, "outer_heads": 2, "outer_ffn": 130,
        "chunk_length": 4, "window": 8, "states": 16,
    },
    "compressed": {
        "preset": "tiny", "attention": "compressed", "dim": 144, "layers": 2, "heads": 4,
        "ffn": 200, "ctx": 32, "head_width": 40, "kv_heads": 2, "window": 8, "ratios": (4, 16),
        "indexed_ratio": 4, "top_k": 2, "index_heads": 2, "index_width": 16,
    },
    "streams": DENSE | {"streams": 2},
}  # fmt: skip
SHAPES["mamba"] = SHAPES["hnet"]


def build(seed: int = 0, **options):
    options = {k: v for k, v in options.items() if k != "batch"}
    model = build_model(preset(options.pop("preset"), **options), torch.float32)
    model.initialise(seed)
    return model


def kind_of(name: str, stds: dict[str, float]) -> str:
    return max((part for part in stds if f".{part}." in f".{name}."), key=len)


def is_norm(name: str) -> bool:
    return "norm" in name


@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
@pytest.mark.parametrize("shape", ["dense", "graph"])
def test_packed_weights_spread_as_the_table_says(shape, rule, small_graph):
    """In size to the rounding to bfloat16, in the share that is not zero to the sampling error."""
    options = DENSE if shape == "dense" else small_graph | {"memgram": True}
    stds, seen = DENSE_STDS if shape == "dense" else GRAPH_STDS, set()
    for name, tensor in build(rule=rule, **options).weights().items():
        weight = tensor.weight(torch.float32)
        if is_norm(name):
            assert (weight == 1).all(), name
            continue
        kind = kind_of(name, stds)
        seen.add(kind)
        full, of_tables = NONZERO[rule]
        share, size = of_tables if kind == "table" else full, stds[kind] / full**0.5
        assert weight.abs().unique()[-1].item() == pytest.approx(size, rel=0.008), name
        assert len(weight.abs().unique()) == 2, name
        error = (share * (1 - share) / weight.numel()) ** 0.5
        assert (weight != 0).float().mean().item() == pytest.approx(share, abs=5 * error), name
        assert abs(weight.sign().mean().item()) < 5 * (share / weight.numel()) ** 0.5, name
    assert seen == set(stds)


@pytest.mark.parametrize("kind", OTHERS)
def test_weights_of_other_models_spread_as_the_table_says(kind):
    """Numbers that are given are packed within half a percent of themselves."""
    options, stds = OTHERS[kind]
    outer = {"coders": stds["coders"], "blocks": stds["blocks"]} if "coders" in stds else {}
    seen = set()
    for name, tensor in build(**SHAPES[kind] | options).weights().items():
        weight = tensor.weight(torch.float32)
        if tensor.frozen:
            assert (weight == 1).all(), name
            continue
        coder = "encoder" in name or "decoder" in name
        part = "coders" if coder else "blocks" if name.startswith("blocks") else None
        table = outer.get(part, stds)
        found = kind_of(name, {k: v for k, v in table.items() if not isinstance(v, dict)})
        seen.add((part if table is not stds else None, found))
        wanted = table[found]
        if isinstance(wanted, tuple):
            assert weight.flatten().tolist() == pytest.approx(wanted, rel=0.008), name
        elif name.endswith("beta.weight") and weight.shape[1] == 16:
            assert weight.std().item() == pytest.approx(wanted / 2, rel=0.1)
        else:
            error = 5 * wanted / (2 * weight.numel()) ** 0.5
            assert weight.std().item() == pytest.approx(wanted, abs=error + 0.008 * wanted), name
    every = {(part, k) for part, of_part in outer.items() for k in of_part}
    assert seen == every | {(None, k) for k, v in stds.items() if not isinstance(v, dict)}


@pytest.mark.parametrize("weights", ["float", "ste"])
def test_weights_of_a_twin_spread_as_the_table_says(weights):
    for name, part in build(weights=weights, **DENSE).weights().items():
        if not is_norm(name):
            std, latent = DENSE_STDS[kind_of(name, DENSE_STDS)], part.latent
            error = 5 / (2 * latent.numel()) ** 0.5
            assert latent.std().item() == pytest.approx(std, rel=error), name
            assert abs(latent.mean().item()) < 5 * std / latent.numel() ** 0.5, name


def values(part) -> torch.Tensor:
    """Read what was drawn: z of a packed tensor, else the weights."""
    if not isinstance(part, TernaryTensor):
        return part.latent.detach().double()
    (digit, _), *_ = part.rule.digits(part.state).values()
    return unpack_trits(part.trits, part.in_features).double() * part.rule.radix + digit


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlate in units of the standard error of independent values."""
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item() * a.numel() ** 0.5


@pytest.mark.parametrize("kind", ["ternary", "float", "graph"])
def test_two_seeds_differ_everywhere_and_no_two_tensors_are_alike(kind, small_graph):
    options = small_graph | {"memgram": True} if kind == "graph" else DENSE | {"weights": kind}
    drawn = [
        {name: values(part) for name, part in build(seed, **options).weights().items()
         if not is_norm(name)}
        for seed in (0, 1)
    ]  # fmt: skip
    for name in drawn[0]:
        assert abs(correlation(drawn[0][name], drawn[1][name])) < 5, name
    for one, other in itertools.combinations(drawn[0], 2):
        a, b = drawn[0][one], drawn[0][other]
        rows, columns = min(len(a), len(b)), min(a.shape[1], b.shape[1])
        assert abs(correlation(a[:rows, :columns], b[:rows, :columns])) < 5, (one, other)
    for name, value in drawn[0].items():  # nor two halves of one
        half = len(value) // 2
        assert abs(correlation(value[:half], value[half : 2 * half])) < 5, name
