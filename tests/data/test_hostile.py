"""Checkpoints made to harm: their digests are right, and what they say of a model cannot be."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from arbcli.base.atomic_files import write_json
from arbcli.base.errors import ArbError
from arbcli.base.run_files import latest_run
from arbcli.config.presets import config_from_dict
from arbcli.config.settings import LARGEST, LARGEST_OF
from arbcli.data.opening import open_texts
from arbcli.generation.load import load_model
from arbcli.model.build import build_model
from arbcli.model.checkpoint import save_checkpoint
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run
from arbcli.training.trainer import Trainer, text_digest
from tests.model.test_checkpoint import pack, reseal, unpack

SMALL = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2}
NO_SIZES = (
    0, -1, -(2**70), LARGEST + 1, 10**6 + 1, 10**9, 2**31, 2**40, 2**63, 10**400, 33.0, 1e30, True,
    None, "32", "", [], [32], [[]], {}, {"a": 1},
)  # fmt: skip
NO_PAIRS = ([], [8], [8, 8, 8], [8, 0], [2**40, 2**40], [8, 8.0], ["8", "8"], None, {})
NO_NAMES = ("", "T5", "\x1b]52;c;aGk=\x07", "x" * 10_000, 32, 3.0, True, [], ["moment"], {})
NO_SWITCHES = (0, 1, "True", None, [], 1.0)


@pytest.fixture(scope="module")
def honest(tmp_path_factory, small_graph, small_hnet, small_compressed) -> list[bytes]:
    """Write a checkpoint of each architecture."""
    folder = tmp_path_factory.mktemp("honest")
    text = folder / "text.txt"
    text.write_bytes(b"ternary weights learn to read. " * 100)
    checkpoints = []
    for options in (SMALL, small_graph | {"memgram": True}, small_hnet, small_compressed):
        config = new_config(**options, data=[str(text)], device="cpu")
        texts = open_texts(config.data, None, seed=0, context=config.model.ctx)
        checkpoint = Trainer(config, texts).checkpoint(text_digest(texts))
        checkpoints.append(save_checkpoint(folder, checkpoint).read_bytes())
    return checkpoints


def saved_config(header: dict) -> dict:
    return json.loads(header["__metadata__"]["arb"])["config"]


def altered_field(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Give a field of the configuration, or two, a value that it cannot have."""
    config = saved_config(header)
    for name in draw.sample(sorted(config), draw.choice((1, 1, 2))):
        value = config[name]
        if isinstance(value, bool):
            config[name] = draw.choice(NO_SWITCHES)
        elif isinstance(value, int):
            fits = LARGEST_OF.get(name, LARGEST)
            values = [v for v in NO_SIZES if type(v) is not int or not 1 <= v <= fits]
            config[name] = draw.choice(values)
        else:
            config[name] = draw.choice(NO_PAIRS if isinstance(value, list) else NO_NAMES)
    return reseal(header, {"config": config}), data


def other_size(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Say that the model is larger than its tensors, by sizes that a model can have."""
    config = saved_config(header)
    *outer, stage = config["stages"]
    number, block = draw.choice((2, 16, 256)), stage["blocks"][0]
    wider = block | {"channel": block["channel"] | {"width": number * block["channel"]["width"]}}
    other = draw.choice(
        ({"blocks": stage["blocks"] * number}, {"dim": stage["dim"] * number}, {"blocks": [wider]})
    )
    config["stages"] = [*outer, stage | other]
    return reseal(header, {"config": config}), data


def other_fields(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Leave a field out, or add some."""
    config = saved_config(header)
    if draw.random() < 0.5:
        *outer, stage = config["stages"]
        without = {name: value for name, value in stage.items() if name != "dim"}
        del config[draw.choice(("ctx", "stages"))]
        if "stages" in config and draw.random() < 0.5:
            config |= {"ctx": 16, "stages": [*outer, without]}
    else:
        config |= {f"field{number}": number for number in range(draw.choice((1, 10_000)))}
    return reseal(header, {"config": config}), data


def other_metadata(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Count to what is not a count."""
    nested: list = []
    for _ in range(400):
        nested = [nested]
    return reseal(header, draw.choice((
        {"step": 2**63}, {"step": -1}, {"step": 1.5}, {"counters": {"refused": 2**70}},
        {"counters": {"refused": -1}}, {"counters": {"refused": "1"}}, {"config": {}},
        {"config": {"dim": nested}}, {"counters": []}, {"data": None}, {"format": True},
    ))), data  # fmt: skip


def many_blocks(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Name a thousand blocks that have next to nothing."""
    number = draw.choice((500, 1024))
    names = [f"blocks.{block}.mlp.trits" for block in range(number)]
    config = saved_config(header)
    *outer, stage = config["stages"]
    config["stages"] = [*outer, stage | {"blocks": stage["blocks"][:1] * number}]
    return claim(header, config, {name: (torch.uint8, [0]) for name in names})


def many_stages(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Give a model more stages, or outer blocks, than anybody can build at once."""
    config = saved_config(header)
    stages = draw.choice((2, 8, 1000))
    *_, stage = config["stages"]
    blocks = stage["blocks"][:1] * draw.choice((256, 2000))
    chunking = {"kind": "chunking", "boundaries": "every", "length": 2}
    outer = {"dim": stage["dim"], "before": blocks, "after": blocks, "chunking": chunking}
    return reseal(header, {"config": config | {"stages": [outer] * stages + [stage]}}), data


def sparse(header: dict, data: bytes, draw: random.Random) -> tuple[dict, bytes]:
    """Claim a model of terabytes, in a file that has holes in place of them."""
    config = saved_config(header)
    attention = {"kind": "attention", "heads": 1}
    block = {"mixer": attention, "channel": {"kind": "mlp", "width": 1}}
    config |= {"stages": [{"dim": 2**18, "blocks": [block]}]}
    with torch.device("meta"):
        layout = build_model(config_from_dict(config)).state_dict()
    return claim(header, config, {name: (t.dtype, list(t.shape)) for name, t in layout.items()})


def claim(header: dict, config: dict, layout: dict) -> tuple[dict, int]:
    """Form the header of some tensors, and say how many bytes they take."""
    codes = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32"}
    entries, end = {}, 0
    for name, (dtype, shape) in sorted(layout.items()):
        begin = end
        end += torch.empty(shape, dtype=dtype, device="meta").nbytes
        entries[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [begin, end]}
    changes = {"config": config, "digests": dict.fromkeys(entries, "0" * 64)}
    return entries | {"__metadata__": reseal(header, changes)["__metadata__"]}, end


KINDS: tuple[Callable, ...] = (
    *(altered_field,) * 8, *(other_size,) * 2, other_fields, other_metadata, many_blocks,
    many_stages, sparse,
)  # fmt: skip


def write_hostile(path: Path, honest: list[bytes], number: int) -> str:
    """Write the hostile file of a number, and tell its kind."""
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    header, data = kind(*unpack(draw.choice(honest)), draw)
    if isinstance(data, int):
        path.write_bytes(pack(header))
        os.truncate(path, path.stat().st_size + data)
    else:
        path.write_bytes(pack(header, data))
    return kind.__name__


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_hostile_checkpoint_is_refused_by_name(number, honest, tmp_path):
    path = tmp_path / "step-000000.safetensors"
    write_hostile(path, honest, number)
    with pytest.raises(ArbError) as caught:
        load_model(path, device="cpu")
    assert f"`{path}`" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.hint


def test_honest_checkpoint_is_loaded(honest, tmp_path):
    for data in honest:
        path = tmp_path / "step-000000.safetensors"
        path.write_bytes(data)
        assert load_model(path, device="cpu").config.layers <= 2


NO_FACTS = {
    "no object": lambda facts: [],
    "no configuration": lambda facts: facts | {"config": None},
    "settings that are none": lambda facts: facts | {"config": [1]},
    "steps": lambda facts: facts | {"config": facts["config"] | {"steps": 12.0}},
    "too many batches": lambda facts: facts | {"config": facts["config"] | {"accum": 2**31 - 1}},
    "warmup": lambda facts: facts | {"config": facts["config"] | {"warmup": -(2**70)}},
    "lr": lambda facts: facts | {"config": facts["config"] | {"lr": "1.0"}},
    "compute": lambda facts: facts | {"config": facts["config"] | {"compute": ["bf16"]}},
    "texts": lambda facts: facts | {"config": facts["config"] | {"data": [1]}},
    "model": lambda facts: facts | {"config": facts["config"] | {"model": {"dim": 10**9}}},
    "text": lambda facts: facts | {"text": []},
    "entropy": lambda facts: facts | {"text": facts["text"] | {"entropy": "high"}},
    "paths": lambda facts: facts | {"text": facts["text"] | {"paths": {"data": [[]], "val": []}}},
    "digests": lambda facts: facts | {"digests": []},
    "start": lambda facts: facts | {"started": 5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_bytes(b"ternary weights learn to read. " * 100)
    config = new_config(**SMALL, data=[str(folder / "text.txt")], device="cpu", steps=1)
    start_run(config, folder / "run", Observer())
    return folder / "run"


@pytest.mark.parametrize("name", NO_FACTS)
def test_hostile_config_of_a_run_is_refused(name, run, tmp_path):
    facts = json.loads((run / "config.json").read_text())
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", NO_FACTS[name](facts))
    (checkpoint,) = run.glob("*1.safetensors")
    os.link(checkpoint, tmp_path / "run" / checkpoint.name)
    with pytest.raises(ArbError):
        resume_run(latest_run(tmp_path), Observer())
