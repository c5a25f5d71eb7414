"""Files that come with a model and that nobody trains: configuration, settings, chat template.

They lie in `COMPANIONS` of a run, as they came, and go along where a run begins with its weights.
The tokenizer lies in the run itself, as that of every run does.
"""

from pathlib import Path

from arbcli.checkpoint import write_file
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.errors import ArbError
from arbcli.imports.config_json import read_config
from arbcli.imports.dense import shape_of
from arbcli.imports.folder import CONFIG
from arbcli.reading import open_regular, read_json
from arbcli.run_files import COMPANIONS

GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
NAMES = (
    CONFIG, GENERATION, TEMPLATE, "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.json",
)  # fmt: skip
"""Files that go along, those that there are."""
LARGEST = 2**27
"""Bytes of one."""


def copy_companions(source: Path, target: Path) -> None:
    """Copy the companions of a folder, byte for byte.

    Raises:
        ArbError: one cannot be read or written, or is too large for what it says it is.
    """
    found = [name for name in NAMES if (source / name).exists()]
    if not found:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArbError(
            f"cannot make `{target}`: {error.strerror}", hint="choose another `--out`"
        ) from error
    for name in found:
        write_companion(target / name, read_companion(source / name))


def read_companion(path: Path) -> bytes:
    """Read a file that comes with a model, of at most `LARGEST` bytes.

    Raises:
        ArbError: it cannot be read, or is too large for what its name says.
    """
    with open_regular(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ArbError(
            f"`{path}` has more than {LARGEST:,} bytes", hint="remove it, if it is not needed"
        )
    return content


def write_companion(path: Path, content: bytes) -> None:
    """Write a file that comes with a model.

    Raises:
        ArbError: it cannot be written.
    """
    write_file(path, lambda file: file.write(content))


def companions_of(run: Path, config: ModelConfig) -> Path | None:
    """Find the folder of companions of a run; None if it has none.

    Raises:
        ArbError: they are of another model.
    """
    folder = run / COMPANIONS
    if not (folder / CONFIG).exists():
        return None
    theirs = shape_of(read_config(read_json(folder / CONFIG, {}), f"`{folder / CONFIG}`"))
    ours = shape_of(config)
    if ours is None or theirs._replace(ctx=ours.ctx) != ours:
        raise ArbError(
            f"`{folder}` came with another model than the one of `{run}`",
            hint="restore the folder that the import made",
        )
    return folder


def check_without_companions(config: ModelConfig, run: Path) -> None:
    """Refuse a model of tokens that lost the folder which says what its tokens are.

    Raises:
        ArbError: it reads tokens.
    """
    if config.vocabulary != VOCABULARY:
        raise ArbError(
            f"the model reads {config.vocabulary:,} tokens, and there is no `{run / COMPANIONS}`"
            " with their tokenizer",
            hint="restore the folder that the import made, or use `--to safetensors`",
        )
