"""A BitNet of Transformers becomes trits, is tuned, and is given back as the same kind."""

import copy
import json

import pytest
import torch
from folders import BITNET, random_model
from safetensors.torch import load_file, save_file

from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.generation.load import load_weights
from arbcli.interop.exporting import export
from arbcli.interop.huggingface.dense import sources
from arbcli.interop.importing import import_folder
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.layers import bitnet
from arbcli.verify.reference import Reference

TEXT = "def main(self):\n    return 1234\n\n" * 40
MODES = {
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
    "offline": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "bitlinear": {"linear_class": "bitlinear"},
}
"""Forms of weights: floats whose trits follow from them, and packed ones with one scale."""


@pytest.fixture(scope="module", autouse=True)
def eager():
    """Compile no layer of Transformers, which takes a C++ compiler."""
    pytest.importorskip("accelerate", reason="needs the extra `trainers`")
    torch._dynamo.config.disable = True
    yield
    torch._dynamo.config.disable = False


def write_folder(transformers, folder, mode: str, **changes) -> dict[str, tuple]:
    """Write a BitNet of a mode; return the trits and the scale of each matrix."""
    from transformers.integrations.bitnet import pack_weights

    random_model(transformers, "BitNet", **BITNET | changes).save_pretrained(folder)
    weights, wanted = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = 1.0 / weights[name].abs().mean().clamp_(min=1e-5)
        trits = (weights[name] * scale).round().clamp(-1, 1)
        wanted[name] = trits.to(torch.int8), float(1 / scale)
        if mode != "online":
            weights[name] = pack_weights(trits.clone())
            factor = scale if mode == "bitlinear" else 1 / scale
            weights[f"{name}_scale"] = factor.view(1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    about = {"quantization_config": {"quant_method": "bitnet"} | MODES[mode]}
    about = read_json(folder / "config.json") | about | {"rope_parameters": None}  # the default
    (folder / "config.json").write_text(json.dumps(about))
    return wanted


def assert_trits(run, wanted) -> None:
    """Compare all trits, and the scales, which are rounded to the closest of the list."""
    names = set()
    for source in sources(load_weights(run, print).model):
        for part in source.parts:
            if part.hugging_face in wanted:
                names.add(part.hugging_face)
                trits, scale = wanted[part.hugging_face]
                tensor = source.tensor
                ours = unpack_trits(tensor.trits[part.rows], tensor.in_features)
                assert torch.equal(ours, trits)
                weight = tensor.weight(torch.float32)[part.rows]
                assert (weight.abs()[trits != 0] / scale - 1).abs().max() < 0.0055
    assert names == {*wanted}


@pytest.mark.parametrize("mode", ["online", "bitlinear"])  # the other one is tuned below
@torch.no_grad()
def test_trits_are_kept_and_computed_with_alike(transformers, mode, tmp_path, monkeypatch):
    wanted = write_folder(transformers, tmp_path / "folder", mode)
    import_folder(tmp_path / "folder", tmp_path / "run")
    assert_trits(tmp_path / "run", wanted)
    export(tmp_path / "run", "hf", out=tmp_path / "back", kind="f32")
    about = read_json(tmp_path / "back" / "config.json")["quantization_config"]
    assert about == {"quant_method": "bitnet"} | MODES[mode] | {"quantization_mode": "offline"}
    packed = load_file(tmp_path / "back" / "model.safetensors")
    assert {packed[name].dtype for name in wanted} == {torch.uint8}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    kind = type(theirs.model.layers[0].mlp.down_proj).__name__
    assert kind.lower() == MODES[mode]["linear_class"]

    ids = torch.randint(256, (4, 48), generator=torch.Generator().manual_seed(1))
    logits, ours = theirs.eval()(ids).logits, load_weights(tmp_path / "run", print).model

    def apart() -> torch.Tensor:
        return ((ours(ids) - logits).norm(dim=-1) / logits.norm(dim=-1)).flatten()

    # equal, until a number next to the middle between two levels is rounded to the other one
    assert apart().sort().values[len(ids) * 8] < 1e-5
    assert apart().max() < 0.05
    weights = {name: part.weight(torch.float32).double() for name, part in ours.weights().items()}
    reference, _ = Reference(weights, ours.config)(ids[:1])
    apart_from_reference = (ours(ids[:1]) - reference).norm(dim=-1) / reference.norm(dim=-1)
    assert apart_from_reference.flatten().sort().values[8] < 1e-5
    monkeypatch.setattr(bitnet, "round_rows", lambda y: y)
    assert apart().min() > 1e-3
    assert apart().median() > 0.01

    again = import_folder(tmp_path / "back", tmp_path / "again")
    assert again.relative_error < 1e-7  # a divisor is rounded to float32
    second = load_weights(tmp_path / "again", print).model.state_dict()
    for name, part in ours.state_dict().items():
        if mode != "online" or "remainder" not in name:  # floats begin with what trits leave over
            assert torch.equal(part, second[name]), name


def test_tuned_model_continues_alike_elsewhere(transformers, tmp_path, arb_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(transformers, tmp_path / "folder", "offline")
    (tmp_path / "text").write_text(TEXT)
    for words in (
        "import folder --out run",
        "train --init-from run --data text --steps 12 --batch 4 --ctx 32 --lr 1 --compute fp32"
        " --device cpu --out tuned --eval-every 0",
        "export tuned --to hf --type f32 --out back",
    ):
        done = arb_here(*words.split())
        assert done.returncode == 0, done.stderr
    before, ours = (load_weights(tmp_path / name, print).model for name in ("run", "tuned"))
    changed = scales = 0
    first = {name: part.clone() for name, part in before.state_dict().items()}
    for name, part in ours.state_dict().items():
        if ".qkv." in name or ".gate_up." in name or ".output." in name:
            changed += "trits" in name and not torch.equal(part, first[name])
            scales += name.endswith(("exponent", "fraction"))
            assert not name.endswith(("exponent", "fraction")) or torch.equal(part, first[name])
    assert changed == 8
    assert scales == 16

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    ids = list(b"def main")
    tokens = theirs.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0].tolist()  # fmt: skip
    continued = list(ids)
    with torch.no_grad():
        while len(continued) < len(tokens):
            continued.append(int(ours(torch.tensor([continued]))[0, -1].argmax()))
        text = torch.tensor([list(TEXT[:60].encode())])
        losses = [float(model.loss(text[:, :-1], text[:, 1:])) for model in (before, ours)]
    assert tokens == continued
    assert losses[1] < losses[0] - 0.5

    tune = ("train", "--init-from", "run", "--data", "text", "--out", "fading")
    done = arb_here(*tune, "--weights", "anneal")
    assert "error: `bitnet` has norms with gains before each product, and trits" in done.stderr
    done = arb_here("export", "tuned", "--to", "gguf", "--out", "back.gguf")
    assert "error: llama.cpp computes the MLP of a BitNet with SiLU" in done.stderr
    assert not (tmp_path / "back.gguf").exists()


def test_other_bitnets_are_refused_by_name(transformers, tmp_path):
    write_folder(transformers, tmp_path / "folder", "bitlinear")
    path = tmp_path / "folder" / "config.json"
    about = json.loads(path.read_text())
    for name, value in (
        ("quant_method", "gptq"), ("linear_class", "linear"), ("quantization_mode", "online"),
        ("use_rms_norm", True), ("modules_to_not_convert", ["model.layers.0"]), ("bits", 4),
    ):  # fmt: skip
        changed = copy.deepcopy(about)
        changed["quantization_config"][name] = value
        path.write_text(json.dumps(changed))
        with pytest.raises(ArbError, match=f"`quantization_config`: `{name}`"):
            import_folder(tmp_path / "folder", tmp_path / "run")
    path.write_text(json.dumps(about | {"quantization_config": None}))
    with pytest.raises(ArbError, match="has no `quantization_config`"):
        import_folder(tmp_path / "folder", tmp_path / "run")
    path.write_text(json.dumps(about))
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    for changed, message in ((None, "up_proj.weight` is U8"), (torch.zeros(1), f"{scale}` is 0.0")):
        others = {name: part for name, part in weights.items() if name != scale}
        others |= {} if changed is None else {scale: changed}
        save_file(others, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
        with pytest.raises(ArbError, match=message):
            import_folder(tmp_path / "folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@torch.no_grad()
def test_floats_that_are_trits_by_group_are_kept_as_trits(transformers, tmp_path):
    """As a Qwen 3 whose ternary weights were unpacked, with a scale for 128 neighbours."""
    model = random_model(transformers, "Qwen 3, tied", hidden_size=160)
    generator, wanted = torch.Generator().manual_seed(3), {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            trits = torch.randint(-1, 2, weight.shape, generator=generator)
            groups = -(-weight.shape[1] // 128)
            scales = (0.05 + 0.1 * torch.rand(len(weight), groups, generator=generator)).half()
            scales = scales.float().repeat_interleave(128, dim=1)[:, : weight.shape[1]]
            weight.copy_(trits * scales)
            wanted[name] = trits.to(torch.int8), scales[trits != 0]
    model.half().save_pretrained(tmp_path / "folder")
    report = import_folder(tmp_path / "folder", tmp_path / "run")
    assert report.relative_error < 0.003
    ours = load_weights(tmp_path / "run", print).model
    assert (ours.config.digits, ours.config.scale_type) == ("trit", "T128")
    assert_trits(tmp_path / "run", wanted)
    ids = torch.arange(40)[None]
    logits = model.float()(ids).logits
    assert (ours(ids) - logits).norm() < 0.02 * logits.norm()
    (report,) = [import_folder(tmp_path / "folder", tmp_path / "mixed", scale_type="T96")]
    assert load_weights(tmp_path / "mixed", print).model.config.digits == "all"
