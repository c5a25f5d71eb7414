"""Checkpoints made to harm: their digests are right, and what they say of a model cannot be."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from arbcli.base.atomic_files import write_json
from arbcli.base.errors import ArbError
from arbcli.base.run_files import latest_run
from arbcli.config.presets import config_from_dict
from arbcli.generation.load import load_model
from arbcli.model.build import build_model
from arbcli.model.checkpoint import _canonical, _seal
from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run


def change_model(**changes):
    return lambda config: config | changes


def change_stage(**changes):
    return lambda config: config | {"stages": [config["stages"][0] | changes]}


def chunked(stages: int, blocks: int):
    """Give a model more stages, or outer blocks, than anybody can build at once."""

    def change(config: dict) -> dict:
        (main,) = config["stages"]
        some, about = main["blocks"][:1] * blocks, {"kind": "chunking", "length": 2}
        outer = {"dim": main["dim"], "before": some, "after": some, "chunking": about}
        return config | {"stages": [outer] * stages + [main]}

    return change


NO_SIZES = (0, -1, 2**20 + 1, 2**63, 10**400, 33.0, 1e30, True, None, "32", [32], {"a": 1})
NO_NAMES = ("", "T5", "\x1b]52;c;aGk=\x07", "x" * 10_000, 32, True, ["moment"], {})
HOSTILE = [
    *(change_stage(dim=value) for value in NO_SIZES),
    *(change_model(ctx=value) for value in NO_SIZES),
    *(change_model(rule=value) for value in NO_NAMES),
    *(change_model(scale_type=value) for value in NO_NAMES),
    *(change_model(tied=value) for value in (0, 1, "True", None, [], 1.0)),
    change_stage(dim=512), change_stage(blocks=[[]] * 9), change_stage(blocks=3),
    lambda config: change_stage(blocks=config["stages"][0]["blocks"][:1] * 16)(config),
    chunked(1, 2000), chunked(9, 1),
    lambda config: {name: value for name, value in config.items() if name != "ctx"},
    change_model(**{f"field{number}": number for number in range(10_000)}), lambda config: {},
]  # fmt: skip
"""Changes of a configuration that is saved."""


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_configuration_is_refused_by_name(number, finished_run, tmp_path):
    header, data = unpack((finished_run / "step-000001.safetensors").read_bytes())
    config = HOSTILE[number](saved_config(header))
    assert_refused(tmp_path, pack(reseal(header, {"config": config}), data))


def pack(header: dict, data: bytes = b"") -> bytes:
    """Join a canonical header and data."""
    text = _canonical(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def unpack(data: bytes) -> tuple[dict, bytes]:
    """Split a file into its header and the data."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def reseal(header: dict, changes: dict[str, object]) -> dict:
    """Change fields of the metadata and make the digest of the whole agree with them."""
    metadata = json.loads(header["__metadata__"]["arb"]) | changes
    return header | {"__metadata__": {"arb": _canonical(_seal(metadata))}}


def saved_config(header: dict) -> dict:
    return json.loads(header["__metadata__"]["arb"])["config"]


def assert_refused(folder: Path, content: bytes, hole: int = 0) -> None:
    path = folder / "step-000000.safetensors"
    path.write_bytes(content)
    os.truncate(path, len(content) + hole)
    with pytest.raises(ArbError) as caught:
        load_model(path, device="cpu")
    assert f"`{path}`" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.hint


def test_model_of_terabytes_is_refused_by_name(finished_run, tmp_path):
    """In a file that has holes in place of its tensors."""
    header, _ = unpack((finished_run / "step-000001.safetensors").read_bytes())
    block = {"mixer": {"kind": "attention", "heads": 1}, "channel": {"kind": "mlp", "width": 1}}
    config = change_model(stages=[{"dim": 2**18, "blocks": [block]}])(saved_config(header))
    with torch.device("meta"):
        layout = build_model(config_from_dict(config)).state_dict()
    codes = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32"}
    entries, end = {}, 0
    for name, part in sorted(layout.items()):
        offsets, end = [end, end + part.nbytes], end + part.nbytes
        about = {"dtype": codes[part.dtype], "shape": [*part.shape], "data_offsets": offsets}
        entries[name] = about
    changes = {"config": config, "digests": dict.fromkeys(entries, "0" * 64)}
    metadata = {"__metadata__": reseal(header, changes)["__metadata__"]}
    assert_refused(tmp_path, pack(entries | metadata), end)


RECORDED = Path(__file__).with_name("wrong_facts.txt").read_text(encoding="utf-8")
"""Changes of `config.json` with the messages of their refusals."""


@pytest.mark.parametrize(("changes", "said"), re.findall(r"(.*)\n  (.*)\n", RECORDED))
def test_hostile_config_of_a_run_is_refused(changes, said, finished_run, tmp_path):
    facts = json.loads((finished_run / "config.json").read_text())
    for name, value in json.loads(changes).items():
        facts[name] = facts[name] | value if isinstance(value, dict) else value
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", facts)
    checkpoint = "step-000001.safetensors"
    os.link(finished_run / checkpoint, tmp_path / "run" / checkpoint)
    with pytest.raises(ArbError) as caught:
        resume_run(latest_run(tmp_path), Observer())
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == said
