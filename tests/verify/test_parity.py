"""Models agree with their references on the torch backend, and small ones in the kernels."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.families.compressed import attention as compressed_attention
from arbcli.families.graph import codebook
from arbcli.verify import parity
from arbcli.verify.models import FULL_SIZE, LARGEST, MODELS, RAGGED, fits, shortened
from arbcli.verify.parity import CHECKS
from arbcli.verify.subjects import Subject, all_subjects


def failed(results):
    return [result for result in results if not result.passed]


IN_BF16 = ("ragged", "graph", "hnet")
"""Models that are also compared in bf16, where choices are their own."""
QUICK = [
    name for name in MODELS
    if name not in {"graph softplus", "graph hash", "hnet mamba", "4 streams", "compressed of all"}
]  # fmt: skip
"""Models of which no other one has all parts."""
STEPPED = ("ragged",)
"""Models that take a step twice; `test_pairs.py` repeats steps of all families, to the bit."""


def subjects_of_torch() -> list[Subject]:
    every = all_subjects(torch.device("cpu"), ("torch",), ["T32"])
    left_out = {*MODELS} - {*QUICK}
    return [
        s for s in every
        if (s.dtype == torch.float32 or s.name.split(" T")[0] in IN_BF16)
        and s.name.split(" T")[0] not in left_out and s.batch < 12
    ]  # fmt: skip


@pytest.fixture(scope="module")
def zeros() -> list[tuple[str, str]]:
    """List gradients of whole models that are 0."""
    return []


@pytest.fixture(scope="module")
def torch_results(zeros):
    """Compare small models in float32, and some of them in bf16 too."""
    results = []
    compare, repeat = Subject.result, parity._determinism

    def noted(subject, check, item, got, expected, gate):
        if check == "whole gradient" and not got.any():
            zeros.append((subject.name, item))
        return compare(subject, check, item, got, expected, gate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "result", noted)
        patch.setattr(
            parity, "_determinism",
            lambda subject: repeat(subject) if subject.name.split(" T")[0] in STEPPED else (),
        )  # fmt: skip
        for tested in subjects_of_torch():
            results += parity.check_model(tested)
    return results


@pytest.mark.parametrize("check", CHECKS)
def test_torch_backend_agrees_with_the_reference(torch_results, check):
    results = [result for result in torch_results if result.check == check]
    assert results
    assert not failed(results)


def subject(name: str, parts: tuple[str, ...] = ("blocks", "whole"), **options) -> Subject:
    """Take one of the small models, with scales of groups of 6."""
    config = replace(RAGGED if name == "ragged" else MODELS[name], scale_type="T6", **options)
    return Subject(name, config, 2, torch.float32, torch.device("cpu"), "torch", parts)


def use_kernels(subject: Subject, device: torch.device) -> Subject:
    """Compare in the kernels of a GPU, or in the interpreter."""
    backend = "triton" if device.type == "cuda" else "interpreter"
    return replace(subject, device=device, backend=backend)


def test_blocks_agree_with_the_reference_in_the_kernels(device):
    (stage,) = RAGGED.stages
    short = subject("ragged", ("blocks",), stages=(replace(stage, blocks=stage.blocks[:1]),))
    results = parity.check_model(use_kernels(short, device))
    assert not failed(results)
    # embedding, qkv, output, gate-up, down, head; and the inputs of the block and of the head
    assert sum(result.check == "gradient" for result in results) == 8


@pytest.mark.slow
def test_model_of_memories_agrees_with_the_reference_in_the_kernels(device):
    assert not failed(parity.check_model(use_kernels(subject("graph"), device)))


def test_tied_and_unused_weights_are_compared():
    """A context of two bytes completes no entry, so nothing reads the indexer."""
    assert not failed(parity.check_model(subject("compressed", ctx=2, tied=True)))


LOSSES = {
    "graph": {"text", "ponder"}, "hnet": {"text", "ratio"}, "hnet words": {"text"},
    "compressed": {"text", "indexer"}, "mixed": {"text", "ratio", "indexer"},
}  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_every_block_and_weight_of_a_model_is_compared(torch_results, name):
    with torch.device("meta"):
        model = parity.build_model(MODELS[name])
    results = [r for r in torch_results if r.model == f"{name} T32 fp32"]
    items = {check: [r.item for r in results if r.check == check] for check in CHECKS}
    blocks = [block for block, *_ in parity.named_blocks(model.config)]
    head = [] if model.config.main.router else ["head"]
    assert items["output"] == ["embedding", *blocks, *head]
    losses = {item.split()[0] for item in items["end to end"] if item.endswith(" loss")}
    assert losses == LOSSES.get(name, losses)
    weights = [key for key, tensor in model.weights().items() if not tensor.frozen]
    assert items["whole gradient"] == weights
    prefixes = tuple(f"{part}." for part in ("embedding", *blocks))
    assert {w for w in weights if w.startswith(prefixes)} <= set(items["gradient"])
    assert {f"input of {part}" for part in (*blocks, *head)} <= set(items["gradient"])


def test_no_model_is_let_off_causality_and_no_gradient_is_nothing(torch_results, zeros):
    """Each of few positions is changed; a masked model sees both sides.

    Text is recalled, edges carry, every iteration has a share, experts and entries are used.
    """
    assert zeros == []
    for name in IN_BF16[1:]:  # where choices are their own
        results = [r for r in torch_results if r.model == f"{name} T32 bf16"]
        assert max(r.relative_error for r in results if r.item == "logits") > 1e-3
    counts = Counter(result.model for result in torch_results if result.check == "causality")
    for tested in subjects_of_torch():
        changed = 0 if tested.config.is_masked else 2 * (tested.config.ctx - 1)
        if tested.dtype == torch.float32 and "bits" in tested.checks:
            assert counts[f"{tested.name} fp32"] == changed, tested.name


top_pairs, topk = codebook.top_pairs, torch.Tensor.topk
route = parity.chunking.BoundaryRouter.forward


def neighbours(left, right, top_k):
    """Take rows that are one off."""
    _, rows = top_pairs(left, right, top_k)
    rows = (rows + 1) % (left.shape[1] * right.shape[1])
    i, j = rows // right.shape[1], rows % right.shape[1]
    return left.gather(1, i) + right.gather(1, j), rows


def worst(scores, k, **options):
    """Take the worst of three."""
    several = scores.dim() == 2 and scores.shape[1] == 3
    return topk(scores, k, largest=not several, **options)


def moved(self, x):
    """Begin chunks where p does not say so."""
    routed = route(self, x)
    begins = ~routed.begins
    begins[:, 0] = True
    return routed._replace(begins=begins)


WRONG = {
    "codes": ("graph", codebook, "top_pairs", neighbours),
    "experts": ("graph", torch.Tensor, "topk", worst),
    "boundaries": ("hnet", parity.chunking.BoundaryRouter, "forward", moved),
    "late halting": ("graph", parity.moe_graph, "HALT_SUM", 0.2),
}
"""A model, and what is replaced in it."""
WRONG_ENTRIES = {
    "others": lambda chosen: torch.where(chosen > 0, chosen - 1, chosen),
    "a later one": lambda chosen: torch.where(chosen >= 0, chosen.max(), chosen),
}


@pytest.mark.parametrize("name", [*WRONG, *(f"entries: {name}" for name in WRONG_ENTRIES)])
def test_wrong_choices_are_taken_as_they_are_and_judged_by_the_reference(name, monkeypatch):
    """Nothing fails but their scores."""
    model, _, wrong = name.partition(": ")
    if wrong:
        original = compressed_attention.choose_entries
        monkeypatch.setattr(
            compressed_attention,
            "choose_entries",
            lambda *given: WRONG_ENTRIES[wrong](original(*given)),
        )
        (stage,) = MODELS["compressed"].stages
        tested = subject("compressed", stages=(replace(stage, blocks=stage.blocks[:1]),))
    else:
        model, owner, attribute, replacement = WRONG[name]
        monkeypatch.setattr(owner, attribute, replacement)
        tested = subject(model)
    failures = [result.item for result in failed(parity.check_model(tested))]
    assert failures[:1] == ["scores of choices"]
    assert wrong or len(failures) == 1


@pytest.mark.slow  # of every scale type
@pytest.mark.parametrize("name", ["hnet", "hnet mamba", "mixed"])
def test_no_boundary_is_so_near_that_rounding_decides_it(name):
    """In float32 p is 1e-6 off, not 1e-5: no chunk begins elsewhere on another device."""
    probs = []
    for scale_type in SCALE_TYPES:
        tested = replace(subject(name), config=replace(MODELS[name], scale_type=scale_type))
        model = tested.build()
        for part in model.modules():
            if isinstance(part, parity.chunking.BoundaryRouter):
                part.register_forward_hook(lambda _part, _given, routed: probs.append(routed.p))
        with torch.no_grad():
            model(tested.bytes()[0])
    assert probs
    assert all((p[:, 1:] - 0.5).abs().min() > 1e-5 for p in probs)


@pytest.mark.slow  # shapes of a preset take seconds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_of_memories_agrees_at_the_shapes_of_its_preset(dtype):
    config = shortened(FULL_SIZE["arb-tiny with all parts"])
    run = (config, 1, dtype, torch.device("cpu"), "torch", ("blocks", "whole"))
    assert not failed(parity.check_model(Subject("arb-tiny", *run)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGEST)
def test_preset_agrees_with_the_reference_on_a_gpu(name, device):
    config = shortened(FULL_SIZE[name])
    parts = ("blocks", "whole" if config.main.memories else "bits")
    assert fits(config, device)
    for dtype in (torch.float32, torch.bfloat16):
        assert not failed(
            parity.check_model(Subject(name, config, 1, dtype, device, "triton", parts))
        )


def test_scales_of_a_subject_differ_from_group_to_group():
    for tensor in subject("ragged").build().weights().values():
        assert tensor.fraction.min() >= 0
        if tensor.fraction.numel() > 1 and not tensor.frozen:
            assert tensor.fraction.unique().numel() > 1


@pytest.mark.parametrize(("shift", "passed"), [(0.0, True), (0.09, False)])
def test_rounding_that_is_biased_fails_though_each_number_is_near(shift, passed):
    wanted = torch.linspace(-5, 5, 4000, dtype=torch.float64)
    got = (wanted + shift + torch.rand(4000, generator=torch.Generator().manual_seed(0))).floor()
    assert parity._rounded(subject("ragged"), "", got, wanted, 1.1).passed == passed


@pytest.mark.parametrize(("late", "failing"), [(0, ()), (1, ("at",)), (-1, ("before",))])
def test_logit_that_sees_one_byte_more_or_less_is_not_causal(late, failing, monkeypatch):
    """Its own must move with a byte: later ones that do are not enough."""

    def running_sums(ids):
        sums = ids.cumsum(dim=1)
        ends = torch.zeros_like(sums[:, :1]), sums[:, -1:] + 1
        shifted = {0: sums, 1: torch.cat((ends[0], sums), 1)[:, :-1],
                   -1: torch.cat((sums, ends[1]), 1)[:, 1:]}  # fmt: skip
        return shifted[late][..., None].float()

    monkeypatch.setattr(Subject, "build", lambda subject: running_sums)
    results = list(parity._causality(subject("ragged")))
    assert [result.item.split()[0] for result in results] == ["before", "at"] * 5
    assert [result.passed for result in results] == [w not in failing for w in ("before", "at")] * 5


def test_models_are_compared_in_poisoned_memory(monkeypatch):
    seen = []

    def compare(_):
        seen.append(torch.empty(3).isnan().all().item())
        return []

    monkeypatch.setattr(parity, "_compare", compare)
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = False
    parity.check_model(subject("ragged", ("blocks",)))
    assert seen == [True]
