"""The model agrees with its reference on the torch backend, and one small model in the kernels."""

from dataclasses import replace

import pytest
import torch

from arbcli.config.dense import SCALE_TYPES
from arbcli.config.presets import PRESETS
from arbcli.model.blocks import codebook, compressed_attention
from arbcli.verify import hnet_reference, parity
from arbcli.verify.hnet_reference import reference_boundaries
from arbcli.verify.parity import (
    CHECKS,
    GATES,
    HNETS,
    RAGGED,
    RAGGED_COMPRESSED,
    RAGGED_GRAPH,
    RAGGED_HNET,
    Subject,
    check_parity,
    graph_dtypes,
    matrix_shapes,
    short_graph,
)
from arbcli.verify.reference import reference_weight


def failed(results):
    return [result for result in results if not result.passed]


@pytest.fixture(scope="module")
def of_torch():
    return check_parity(torch.device("cpu"), ["torch"], {"T32": 32, "T6": 6})


@pytest.mark.parametrize("check", CHECKS)
def test_torch_backend_agrees_with_the_reference(of_torch, check):
    results = [result for result in of_torch if result.check == check]
    assert results
    assert not failed(results)


def test_layers_agree_with_the_reference_in_the_kernels(device):
    backend = "triton" if device.type == "cuda" else "interpreter"
    config = replace(RAGGED, layers=1, scale_type="T6")
    subject = Subject("ragged", config, 1, torch.float32, device, backend, "layers")
    results = parity._check("", "", subject)
    assert not failed(results)
    # embedding, qkv, output, gate-up, down, head; and the inputs of the block and of the head
    assert sum(result.check == "gradient" for result in results) == 8


def test_graph_model_agrees_with_the_reference_on_the_torch_backend(of_torch):
    for scale_type, bits in (("T32", (4, 1)), ("T6", (0, 0))):
        results = [r for r in of_torch if r.model == f"graph {scale_type} fp32"]
        counts = {check: sum(r.check == check for r in results) for check in CHECKS}
        assert counts["end to end"] == 3
        assert counts["whole gradient"] == len(gradients_of_graph())
        assert (counts["causality"], counts["determinism"]) == bits


def test_no_model_is_let_off_causality_or_determinism(of_torch):
    """At two positions, but at every one where chunks or entries end."""
    counts: dict[str, list[int]] = {}
    for result in of_torch:
        for place, check in enumerate(("causality", "determinism")):
            counts.setdefault(result.model, [0, 0])[place] += result.check == check
    positions = {"hnet": RAGGED_HNET.ctx - 1, "compressed": RAGGED_COMPRESSED.ctx - 1}
    for subject in parity._subjects(torch.device("cpu"), ("torch",), {"T32": 32, "T6": 6}):
        half = "bf16" if subject.dtype == torch.bfloat16 else "fp32"
        found = counts[f"{subject.name} {half}"]
        number = positions.get(subject.name.split()[0], 2)
        assert found == ([2 * number, 1] if subject.part == "model" else [0, 0]), subject.name


def gradients_of_graph() -> list[str]:
    weights = graph_subject("torch").build().weights()
    return [name for name, tensor in weights.items() if not tensor.frozen]


def graph_subject(backend, device="cpu", part="layers") -> Subject:
    config = replace(RAGGED_GRAPH, scale_type="T6")
    return Subject("graph", config, 2, torch.float32, torch.device(device), backend, part)


def test_graph_model_agrees_with_the_reference_in_the_kernels(device):
    backend = "triton" if device.type == "cuda" else "interpreter"
    results = parity._check("", "", graph_subject(backend, device))
    assert not failed(results)


def test_graph_subject_uses_every_part():
    """No gradient is nothing: text is recalled, edges carry, and every iteration has a share."""
    model = graph_subject("torch").build()
    _, gradients, losses = parity.trace(graph_subject("torch"), model)
    assert sorted(gradients) == sorted(gradients_of_graph())
    assert all(grad.norm() > 0 for grad in gradients.values())
    assert set(losses) == {"text", "ponder"}


def test_graph_model_agrees_in_bf16_where_choices_are_its_own(of_torch):
    for name in ("graph", *GATES, "compressed", "compressed of all"):
        results = [r for r in of_torch if r.model == f"{name} T32 bf16"]
        assert max(r.relative_error for r in results if r.item == "logits") > 1e-3
        assert [r.item for r in results].count("scores of choices") == 1


@pytest.mark.parametrize("shift", [0, 1])
def test_choices_of_codes_are_judged_by_the_reference(shift, monkeypatch):
    """Rows that are one off are taken as they are, and their scores are not the best."""
    found = codebook.best_pairs

    def best_pairs(left, right, top_k):
        _, rows = found(left, right, top_k)
        rows = (rows + shift) % (left.shape[1] * right.shape[1])
        i, j = rows // right.shape[1], rows % right.shape[1]
        return left.gather(1, i) + right.gather(1, j), rows

    monkeypatch.setattr(codebook, "best_pairs", best_pairs)
    results = parity._check("", "", replace(graph_subject("torch"), forced=True))
    assert [r.item for r in failed(results)] == ["scores of choices"] * shift


WRONG = {
    "none": lambda chosen: chosen,
    "others": lambda chosen: torch.where(chosen > 0, chosen - 1, chosen),
    "a later one": lambda chosen: torch.where(chosen >= 0, chosen.max(), chosen),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_choices_of_entries_are_judged_by_the_reference(wrong, monkeypatch):
    """Entries that are not the best, or not there yet: nothing fails but their scores."""
    found = compressed_attention.choose_entries
    monkeypatch.setattr(
        compressed_attention, "choose_entries", lambda *given: WRONG[wrong](found(*given))
    )
    config = replace(RAGGED_COMPRESSED, layers=1, scale_type="T6")
    about = (config, 2, torch.float32, torch.device("cpu"), "torch", "layers", True)
    results = parity._check("", "", Subject("compressed", *about))
    assert [r.item for r in failed(results)][:1] == ["scores of choices"] * (wrong != "none")


@pytest.mark.slow  # of every scale type
@pytest.mark.parametrize("name", ["hnet", "hnet mamba"])
def test_no_boundary_is_so_near_that_rounding_decides_it(name, monkeypatch):
    """The reference of an `HNet` finds its own boundaries: in float32 p is 1e-6 off, not 1e-4."""
    found = []

    def boundaries(*given):
        p, begins = reference_boundaries(*given)
        found.extend((p[1:] - 0.5).abs().tolist())
        return p, begins

    monkeypatch.setattr(hnet_reference, "reference_boundaries", boundaries)
    for scale_type in SCALE_TYPES:
        config = replace(HNETS[name], scale_type=scale_type)
        subject = Subject(name, config, 2, torch.float32, torch.device("cpu"), "torch")
        model = subject.build()
        weights = {key: reference_weight(w) for key, w in model.weights().items()}
        with torch.no_grad():
            hnet_reference.reference_hnet(weights, config, subject.bytes()[0])
    assert min(found) > 1e-4


@pytest.mark.slow  # shapes of a preset take seconds
def test_graph_model_agrees_at_the_shapes_of_its_preset():
    config = short_graph(PRESETS["arb-tiny"])
    for dtype in (torch.float32, torch.bfloat16):
        about = (config, 1, dtype, torch.device("cpu"), "torch", "layers", True)
        assert not failed(parity._check("", "", Subject("arb-tiny", *about)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["arb-tiny", "arb-3b"])
def test_graph_model_agrees_at_the_shapes_of_its_preset_on_a_gpu(name, device):
    for dtype in graph_dtypes(name, device):
        about = (short_graph(PRESETS[name]), 1, dtype, device, "triton", "layers", True)
        assert not failed(parity._check("", "", Subject(name, *about)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tiny_agrees_with_the_reference_on_a_gpu(dtype, device):
    subject = Subject("tiny", PRESETS["tiny"], 2, dtype, device, "triton")
    assert not failed(parity._check("", "", subject))


RAGGED_MODELS = (
    "ragged T32 batch 1 model", "ragged T6 batch 1 layers",
    "ragged T32 batch 12 model", "ragged T6 batch 12 layers",
)  # fmt: skip
OTHER_MODELS = (
    "all digits of moment T32 layers", "all digits of nibble T32 layers",
    "all digits of carry T32 layers", "4 streams T32 model", "2 streams T32 model",
    "graph T32 model", "graph T6 layers", "graph softplus T32 model", "graph hash T32 model",
    "hnet T32 model", "hnet words T32 model", "hnet every T32 model", "hnet mamba T32 model",
    "compressed T32 model", "compressed T6 layers",
)  # fmt: skip
INTERPRETED = ("graph T32 layers", "graph T6 layers", "hnet T32 layers", "compressed T32 layers")
UPDATES = (
    "moment orthogonal", "moment factored", "moment sign", "moment orthogonal all digits",
    "nibble orthogonal", "nibble factored", "nibble sign", "nibble orthogonal all digits",
    "carry orthogonal", "carry factored", "carry sign", "carry factored all digits", "votes",
)  # fmt: skip
CHOOSING = tuple(
    f"{name} T32 layers"
    for name in ("graph", "graph softplus", "graph hash", "compressed", "compressed of all")
)
"""Whose choices in bf16 are taken for the reference's."""
COMPARED = {
    "torch": (RAGGED_MODELS, RAGGED_MODELS, OTHER_MODELS, CHOOSING),
    "triton": (RAGGED_MODELS, RAGGED_MODELS, OTHER_MODELS, CHOOSING),
    "native": (
        RAGGED_MODELS[::2], RAGGED_MODELS[::2], [n for n in OTHER_MODELS if " T6 " not in n],
        CHOOSING,
    ),
    "interpreter": (RAGGED_MODELS[:2], (), INTERPRETED, ()),
}  # fmt: skip
"""Of each backend: the models in both types, and those that are in float32, and in bf16, alone."""


def test_scale_types_of_a_backend_are_those_of_it_alone():
    """Whatever is compared before it: `native` has the first one only."""
    sizes = {"T32": 32, "T6": 6}

    def names(*backends: str) -> list[tuple[str, str]]:
        found = parity._subjects(torch.device("cpu"), backends, sizes)
        return [(subject.backend, subject.name) for subject in found]

    assert names("native", "torch") == names("native") + names("torch")


@pytest.mark.parametrize("backend", COMPARED)
def test_no_model_is_left_out_of_a_comparison(backend, monkeypatch):
    """Of a whole and of a batch, of types, of digits, of directions; and it is what its name is."""
    both_types = (torch.float32, torch.bfloat16)
    fitting = {"arb-tiny": both_types, "arb-3b": (torch.bfloat16,)}
    monkeypatch.setattr(parity, "graph_dtypes", lambda name, device: fitting[name])
    found: dict[str, list[str]] = {}
    for subject in parity._subjects(torch.device("cpu"), (backend,), {"T32": 32, "T6": 6}):
        config, name = subject.config, subject.name
        dtype = str(subject.dtype).removeprefix("torch.")
        if name in PRESETS:
            shorter = replace(PRESETS[name], layers=min(4, PRESETS[name].layers))
            assert config == (short_graph(PRESETS[name]) if subject.forced else shorter)
        elif subject.part == "update":
            words = [config.rule, config.direction, "all digits" * (config.digits == "all")]
            assert name == " ".join(word for word in words if word)
            dtype = "update"
        elif name.startswith("ragged"):
            assert f"{config.scale_type} batch {subject.batch}" in name
        else:
            of_entries = name.startswith("compressed")
            assert subject.forced == (of_entries or subject.dtype == torch.bfloat16)
            dtype = f"{dtype} alone"
            assert config.scale_type in name
            assert ("all digits" in name) <= (config.digits == "all")
            assert (f"{config.streams} streams" in name) == (config.streams > 1)
        found.setdefault(dtype, []).append(name if dtype == "update" else f"{name} {subject.part}")
    single, half, *alone = map(list, COMPARED[backend])
    presets = [f"{name} model" for name in ("tiny", "small", "base", "1b")]
    if backend == "triton":
        single = [*presets, "arb-tiny layers", *single]
        half = [*presets, "arb-tiny layers", "arb-3b layers", *half]
    names = ("float32", "bfloat16", "float32 alone", "bfloat16 alone", "update")
    wanted = dict(zip(names, (single, half, *alone, list(UPDATES)), strict=True))
    assert found == {name: models for name, models in wanted.items() if models}


def test_scales_of_a_subject_differ_from_group_to_group():
    subject = Subject("ragged", RAGGED, 1, torch.float32, torch.device("cpu"), "torch")
    for tensor in subject.build().weights().values():
        assert tensor.fraction.min() >= 0
        if tensor.fraction.numel() > 1:
            assert tensor.fraction.unique().numel() > 1


def test_matrix_shapes_are_those_of_the_presets():
    shapes = matrix_shapes()
    assert len(shapes) == len(set(shapes)) == 33
    assert (2 * 5632, 2048) in shapes
    assert (768, 2048) in shapes


def test_update_compares_every_number_and_every_buffer():
    config = replace(RAGGED, rule="moment", direction="factored")
    subject = Subject("", config, 1, torch.float32, torch.device("cpu"), "torch", "update")
    items = {result.item for result in parity._check("", "", subject)}
    numbers = {
        f"{name} of micro-batch {micro}" for name in "zvm" for micro in ("1/1", "1/2", "2/2")
    }
    buffers = ("trits", "exponent", "fraction", "remainder", "moment",
               "row_statistic", "column_statistic")  # fmt: skip
    assert items == numbers | {f"{name} given NaN" for name in buffers}


@pytest.mark.parametrize(("shift", "passed"), [(0.0, True), (0.09, False)])
def test_rounding_that_is_biased_fails_though_each_number_is_near(shift, passed):
    subject = Subject("", RAGGED, 1, torch.float32, torch.device("cpu"), "torch", "update")
    wanted = torch.linspace(-5, 5, 4000, dtype=torch.float64)
    got = (wanted + shift + torch.rand(4000, generator=torch.Generator().manual_seed(0))).floor()
    assert parity._rounded(subject, "", got, wanted).passed == passed


def test_steps_that_differ_in_the_state_alone_are_no_equal_ones(monkeypatch):
    """The losses of a step are of before it: only the state tells that rounding was another."""
    subject = Subject("", RAGGED, 1, torch.float32, torch.device("cpu"), "torch")
    assert [result.passed for result in parity._determinism(subject)] == [True]
    seeds, updater = iter((3, 4)), parity.Updater
    monkeypatch.setattr(
        parity, "Updater", lambda weights, _, dtype: updater(weights, next(seeds), dtype)
    )
    (result,) = parity._determinism(subject)
    assert not result.passed
    losses = len(subject.build().losses(*subject.bytes()))
    assert result.shape == (losses + len(subject.build().state_dict()),)


def test_steps_that_differ_in_the_loss_alone_are_no_equal_ones(monkeypatch):
    subject = Subject("", RAGGED, 1, torch.float32, torch.device("cpu"), "torch")
    times, losses = iter((1.0, 1.0 + 2.0**-20)), parity.LanguageModel.losses
    scale = {}

    def scaled(model, ids, targets):
        scale.setdefault(id(model), next(times))
        found = losses(model, ids, targets)
        exact = found["text"]
        with torch.no_grad():
            moved = exact * scale[id(model)] - exact
        return {"text": exact + moved}  # with the gradient of the exact one

    monkeypatch.setattr(parity.LanguageModel, "losses", scaled)
    (result,) = parity._determinism(subject)
    assert (result.passed, result.max_error) == (False, 1.0)


@pytest.mark.parametrize(("late", "failing"), [(0, ()), (1, ("at",)), (-1, ("before",))])
def test_logit_that_sees_one_byte_more_or_less_is_no_causal_one(late, failing, monkeypatch):
    """Its own must move with a byte: later ones that do are no excuse."""

    def running_sums(ids):
        sums = ids.cumsum(dim=1)
        ends = torch.zeros_like(sums[:, :1]), sums[:, -1:] + 1
        shifted = {0: sums, 1: torch.cat((ends[0], sums), 1)[:, :-1],
                   -1: torch.cat((sums, ends[1]), 1)[:, 1:]}  # fmt: skip
        return shifted[late][..., None].float()

    monkeypatch.setattr(Subject, "build", lambda subject: running_sums)
    subject = Subject("", RAGGED, 2, torch.float32, torch.device("cpu"), "torch")
    results = list(parity._causality(subject))
    assert [result.item.split()[0] for result in results] == ["before", "at"] * 2
    assert [result.passed for result in results] == [w not in failing for w in ("before", "at")] * 2


def test_models_are_compared_in_poisoned_memory(monkeypatch):
    seen = []

    def layers(_):
        seen.append(torch.empty(3).isnan().all().item())
        return []

    monkeypatch.setattr(parity, "_layers", layers)
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = False
    subject = Subject("", RAGGED, 1, torch.float32, torch.device("cpu"), "torch", "layers")
    parity._check("", "", subject)
    assert seen == [True]
