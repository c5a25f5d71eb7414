"""Models of Transformers are converted, trained, saved, loaded and exported."""

import copy
import weakref

import pytest
import tiny
import torch
from collected import Collected
from states import assert_same
from torch import nn

import arbcli
from arbcli.base.errors import ArbError
from arbcli.generation.load import read_saved, saved_config
from arbcli.interop.huggingface.dense import sources
from arbcli.interop.importing import import_folder
from arbcli.model.build import build_model
from arbcli.nn.weights import Anchored, ExpertStack, Matrix, Numbers, Symbols

FLOATS = ("inv_freq", "embed_scale")
"""Ends of the names of the floats that these models keep: constants."""


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_model_is_converted_trained_saved_and_exported(transformers, name, tmp_path):
    model, ids = tiny.build(name), tiny.batch()
    with torch.no_grad():
        wanted = model(ids).logits
    optimizer = arbcli.to_integers(model, lr=0.3)
    assert all(value.numel() == 0 for value in model.parameters())
    assert all(float_name.endswith(FLOATS) for float_name in arbcli.floats(model))
    stacks = [part for part in model.modules() if isinstance(part, ExpertStack)]
    assert len(stacks) == (2 if name == "qwen3_moe" else 0)  # which are not decoded whole
    with torch.no_grad():
        logits = model(ids).logits
    # each of about ten products in sequence errs by about 0.5 %, as with `arb import`
    assert (logits - wanted).norm() < 0.02 * wanted.norm()

    def loss():
        return model(input_ids=ids, labels=ids).loss

    before = loss().item()
    for _ in range(50):
        step = loss()
        if step < 0.8 * before:
            break
        step.backward()
        optimizer.step()
    assert step < 0.8 * before
    assert optimizer.counters() == {"nonfinite_steps": 0, "refused": 0}

    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path / "integers")
    again = arbcli.load_integers(tmp_path / "integers")
    assert again.generation_config.eos_token_id == [2, 7]
    arbcli.export_float(model, tmp_path / "floats")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "floats", dtype=torch.float32
    ).eval()
    assert not any(isinstance(part, Anchored) for part in plain.modules())
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(again(ids).logits, logits)
        torch.testing.assert_close(plain(ids).logits, logits, rtol=0, atol=1e-5)
    texts = [lm.generate(ids[:, :8], max_new_tokens=4, do_sample=False) for lm in (plain, model)]
    assert torch.equal(*texts)
    if name == "phi3":  # whose exported weights are read as they were
        arbcli.to_integers(plain)
        assert torch.equal(plain(ids).logits, logits)


def test_plain_transformers_refuses_integers(transformers, tmp_path):
    model = tiny.build("qwen3")
    other = type(model)(model.config)
    arbcli.to_integers(model, skip="lm_head")  # whose tied floats are saved once
    model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path / "other")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with pytest.raises(ArbError, match="compute in bfloat16 or float32, and not in float16"):
        arbcli.load_integers(tmp_path, dtype=torch.float16)
    assert torch.equal(arbcli.load_integers(tmp_path).lm_head.weight, model.lm_head.weight)
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = tiny.build("phi3")
    model.save_pretrained(tmp_path / "floats")
    with pytest.raises(ArbError, match="has no integer weights"):
        arbcli.load_integers(tmp_path / "floats")
    with pytest.raises(ArbError, match="was not converted"):
        arbcli.export_float(model, tmp_path / "floats")


@pytest.fixture
def folder(transformers, tmp_path):
    """A folder of a Qwen 3, and its model."""
    model = tiny.build("qwen3", tie_word_embeddings=False, pad_token_id=None)
    model.save_pretrained(tmp_path / "folder")
    return tmp_path / "folder", model


def test_fused_projections_are_those_of_an_imported_model(folder, tmp_path):
    """From the same integers; `test_optimizer.py` has the steps, and the next test gradients."""
    path, model = folder
    import_folder(path, tmp_path / "run", rule="moment", direction="factored")
    saved = read_saved(tmp_path / "run", print).checkpoint
    imported = build_model(saved_config(saved), torch.float32)
    imported.load_state_dict(dict(saved.tensors))
    arbcli.to_integers(model, fuse=arbcli.nn.PROJECTIONS)
    for source in sources(imported):
        weight = model.get_submodule(f"{source.parts[0].hugging_face}_packed")
        for name, part in source.tensor.named_buffers():
            assert torch.equal(getattr(weight, name).view_as(part), part), name
    ids = tiny.batch()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, imported(ids), rtol=0, atol=1e-4)


def test_fused_layers_equal_separate_ones():
    """One backward, from the same, the first and other inputs; what is read has a gradient too."""
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 4)

        def forward(self, x, other, reads):
            y = self.a(x).sin().sum() + self.b(other).cos().sum()
            return y + self.b.weight.sin().sum() if reads else y

    model = Pair()
    twin = copy.deepcopy(model)
    arbcli.to_integers(model, fuse=[["a", "b"]])
    twin.load_state_dict(arbcli.nn.float_state_dict(model, torch.float32))
    x = torch.randn(5, 16)
    for other, reads in ((x, False), (x[:3], False), (x, True), (torch.randn(3, 16), True)):
        seen = Collected(model)
        twin.zero_grad()
        for module in (model, twin):
            module(x, other, reads).backward()
        wanted = torch.cat([twin.a.weight.grad, twin.b.weight.grad])
        torch.testing.assert_close(seen.grads["a.weight"], wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ArbError, match="no module has linear layers `a`, `c`"):
        arbcli.to_integers(Pair(), fuse=[["a", "c"]])


def test_resizing_an_embedding_is_refused_and_ties_stay(transformers):
    for tied in (False, True):
        model, ids = tiny.build("qwen3", tie_word_embeddings=tied), tiny.batch()
        arbcli.to_integers(model)
        wanted = model(ids).logits
        with pytest.raises(ArbError, match="cannot be assigned"):
            model.resize_token_embeddings(120)
        assert torch.equal(model(ids).logits, wanted)
        for one in (model, copy.deepcopy(model)):  # `Trainer` ties a checkpoint that it has loaded
            one.tie_weights()
            one.tie_weights(recompute_mapping=False)
            assert torch.equal(one(ids).logits, wanted)


def test_module_that_is_used_twice_has_all_names_and_taps_are_rows_of_a_matrix():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    wanted = model.state_dict()
    arbcli.to_integers(model)
    floats = arbcli.nn.float_state_dict(model)
    assert {*floats} == {*wanted}
    assert floats["0.weight"] is floats["2.weight"]
    layer = nn.Conv1d(64, 8, 3)
    arbcli.to_integers(layer)
    weight = packed(layer)["weight"]
    assert (weight.matrices, weight.out_features, weight.in_features) == (1, 8, 192)


def test_parameters_of_other_names_are_read_and_trained():
    """A gain of the user, and hooks that compute `weight` from other parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model[0].gain = nn.Parameter(torch.tensor(1.5))
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model[1])
    nn.utils.spectral_norm(model[2])
    model.eval()  # no power iterations
    x = torch.randn(4, 16)

    def run():
        return model(x * model[0].gain)

    wanted = run()
    optimizer = arbcli.to_integers(model, lr=0.3)
    assert (run() - wanted).norm() < 0.02 * wanted.norm()
    before = arbcli.nn.float_state_dict(model)
    for _ in range(2):
        run().square().sum().backward()
        optimizer.step()
    after = arbcli.nn.float_state_dict(model)
    names = ["0.weight", "0.bias", "0.gain", "1.bias", "1.weight_g", "1.weight_v", "2.bias"]
    assert {*before} == {*names, "2.weight_orig", "2.weight_u", "2.weight_v"}
    for name in (*names, "2.weight_orig"):
        assert not torch.equal(before[name], after[name]), name


class Small(nn.Module):
    """A model with a tied head, a gain and a layer that is skipped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        self.head = nn.Linear(64, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


def packed(model: nn.Module) -> dict:
    return {
        name.removesuffix("_packed"): part
        for name, part in model.named_modules()
        if isinstance(part, Anchored)
    }


@pytest.mark.parametrize("skip", [["inner.1"], "inner.1"])
def test_patterns_choose_what_is_converted_and_how(skip):
    model = Small()
    arbcli.to_integers(
        model, skip=skip, rules={"inner.*": "nibble", "*.2.weight": "carry"},
        scale_types={"embedding": "T64"},
    )  # fmt: skip
    assert {*arbcli.floats(model)} == {"inner.1.weight", "inner.1.bias"}
    tensors = packed(model)
    assert {
        name: (type(part), part.rule.name, part.group_size) for name, part in tensors.items()
    } == {
        "embedding.weight": (Symbols, "moment", 64), "inner.0.weight": (Matrix, "nibble", 32),
        "inner.0.bias": (Numbers, "nibble", 32), "inner.2.weight": (Matrix, "carry", 32),
        "inner.2.bias": (Numbers, "nibble", 32),
    }  # fmt: skip
    assert model.head._packed["weight"] is tensors["embedding.weight"]
    assert not any(name.startswith("head") for name in model.state_dict())
    for pattern in ({"skip": ["innner"]}, {"rules": {"x*": "carry"}}):
        with pytest.raises(ArbError, match="no parameter matches"):
            arbcli.to_integers(Small(), **pattern)


def test_tied_weights_step_once_by_both_gradients():
    model, twin = Small(), Small()
    arbcli.to_integers(model)
    twin.load_state_dict(arbcli.nn.float_state_dict(model, torch.float32))
    seen = Collected(model)
    ids = torch.tensor([[1, 5, 5, 0]])
    for module in (model, twin):
        module(ids).sin().sum().backward()
    assert seen.calls == len(seen.grads)
    grad = seen.grads["embedding.weight"]
    torch.testing.assert_close(grad, twin.embedding.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model: model.inner[0].half(), "it is float16"),
        (lambda model: model.inner[0].to("meta"), "no values"),
        (lambda model: nn.init.constant_(model.inner[0].bias, 1e10), "not finite, or"),
        (lambda model: model.inner.append(nn.LSTM(4, 4)), "LSTM reads its weights"),
        (lambda model: nn.utils.parametrizations.weight_norm(model.inner[0]), "parametrized"),
        (lambda model: model.inner.append(nn.EmbeddingBag(3, 4, sparse=True)), "`sparse`"),
        (lambda model: setattr(model, "all", [*model.inner.parameters()]), "a list or dictionary"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name_or_skipped(change, problem):
    model = Small()
    change(model)
    before = {*model.state_dict()}
    with pytest.raises(ArbError, match=problem) as refused:
        arbcli.to_integers(model)
    assert "`inner." in str(refused.value)
    assert {*model.state_dict()} == before  # nothing was converted
    arbcli.to_integers(model, skip_unsupported=True)
    assert any(name.startswith("inner.") for name in arbcli.floats(model))
    assert "embedding.weight" in packed(model)


def test_each_parameter_is_freed_before_the_next_is_rounded(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 8) for _ in range(4)))
    living = [weakref.ref(value) for value in model.parameters()]
    counts, original = [], Anchored.round

    def counted(self, *given):
        counts.append(sum(value() is not None for value in living))
        original(self, *given)

    monkeypatch.setattr(Anchored, "round", counted)
    arbcli.to_integers(model)
    assert counts == [8, 7, 6, 5, 4, 3, 2, 1]
    assert not any(value() is not None for value in living)


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "votes"}, {"rule": "mometn"}, {"weights": "int4"}, {"scale_type": "T5"},
        {"direction": "adam"},
    ],
)  # fmt: skip
def test_unknown_settings_and_a_second_conversion_are_refused(settings):
    model = Small()
    with pytest.raises(ArbError, match="is not supported"):
        arbcli.to_integers(model, **settings)
    arbcli.to_integers(model)
    with pytest.raises(ArbError, match="no float weights to convert"):
        arbcli.to_integers(model)


def test_frozen_parameters_stay_frozen():
    model = Small()
    model.inner[0].requires_grad_(False)
    optimizer = arbcli.to_integers(model, lr=0.3)
    frozen = copy.deepcopy(model.inner[0].state_dict())
    other = model.inner[2].weight.detach().clone()
    for _ in range(2):
        model(torch.tensor([[1, 5, 5, 0]])).logsumexp(-1).sum().backward()
        optimizer.step()
    assert_same(model.inner[0].state_dict(), frozen)
    assert not torch.equal(other, model.inner[2].weight)
