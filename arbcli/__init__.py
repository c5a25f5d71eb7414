"""Train byte-level language models whose whole persistent state is packed trits and int8.

What `import arbcli` offers is described, with examples, in docs/library.md. Torch takes seconds to
import, so each function imports what it needs when it is called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from arbcli.environment import set_environment
from arbcli.errors import ArbError
from arbcli.version import __version__ as __version__

if TYPE_CHECKING:
    from torch import Tensor

    from arbcli.config.training import TrainConfig
    from arbcli.infer.evaluation import EvaluateReport
    from arbcli.model.language_model import LanguageModel
    from arbcli.train.record import TrainReport
    from arbcli.train.run import Observer


def load(
    run: Path | str, *, device: str | None = None, compute: str | None = None
) -> "LanguageModel":
    """Load the model of a run, or of one checkpoint: see `arbcli.infer.load`."""
    set_environment()
    from arbcli.infer.load import load_model

    return load_model(run, device=device, compute=compute)


def configure(**settings: Any) -> "TrainConfig":
    """Make the configuration of a run: see `arbcli.train.configure`.

    Args:
        settings: by the names of the options of `arb train`, with `_` for `-`: `preset`, `data`,
            `steps`, `lr`, `device`. Texts are lists.

    Raises:
        ArbError: they do not fit each other, or this machine.
    """
    set_environment(("--weights", settings.get("weights") or "ternary"))
    from arbcli.train.configure import new_config

    return new_config(**settings)


def train(
    config: "TrainConfig",
    out: Path | str | None = None,
    *,
    minutes: float | None = None,
    init_from: Path | str | None = None,
    observer: "Observer | None" = None,
) -> "TrainReport":
    """Train a model in a new directory: see `arbcli.train.run.start_run`.

    Args:
        config: from `configure`.
        out: directory to make; None is the next free one in `runs`.
        minutes: sets the number of steps by timing a few.
        init_from: a run or a checkpoint to begin with; see `saved_config` for its configuration.
        observer: is told of records; None tells nobody.

    Returns:
        Where the run is, its losses and a sample.

    Raises:
        ArbError: something the user can fix; whatever was saved before is intact.
    """
    from arbcli.infer.load import read_saved
    from arbcli.train.run import Observer, start_run

    observer = observer or Observer()
    initial = None if init_from is None else read_saved(Path(init_from), observer.noted)
    place = None if out is None else Path(out)
    return start_run(config, place, observer, minutes=minutes, initial=initial)


start_training = train
"""The same; `arbcli.train` is the package as well, once a part of it has been imported."""


def resume(
    run: Path | str, *, steps: int | None = None, observer: "Observer | None" = None
) -> "TrainReport":
    """Go on with a run, or from a checkpoint in one: see `arbcli.train.run.resume_run`.

    Args:
        run: a run directory, or a checkpoint in one.
        steps: that the run is to have from now on; None leaves them as they are.
        observer: is told of records; None tells nobody.

    Raises:
        ArbError: there is nothing to continue, or the text has changed.
    """
    set_environment()
    from arbcli.train.run import Observer, resume_run

    return resume_run(Path(run), observer or Observer(), steps=steps)


@overload
def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too
    model: "LanguageModel",
    prompt: bytes | str,
    length: int,
    *,
    temperature: float = ...,
    top_k: int = ...,
    top_p: float = ...,
    seed: int = ...,
    kv: str | None = ...,
    batch: int | None = ...,
    ahead: int | None = ...,
) -> bytes: ...


@overload
def generate(
    model: "LanguageModel",
    prompt: Sequence[bytes | str],
    length: int,
    *,
    temperature: float = ...,
    top_k: int = ...,
    top_p: float = ...,
    seed: int = ...,
    kv: str | None = ...,
    batch: int | None = ...,
    ahead: int | None = ...,
) -> list[bytes]: ...


def generate(
    model: "LanguageModel",
    prompt: bytes | str | Sequence[bytes | str],
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int = 256,
    top_p: float = 1.0,
    seed: int = 0,
    kv: str | None = None,
    batch: int | None = None,
    ahead: int | None = None,
) -> bytes | list[bytes]:
    """Continue a prompt, or several at once; the same bytes every time.

    See `arbcli.infer.generation.generate`, and `arbcli.infer.several` for several.

    Args:
        model: from `load`.
        prompt: at least one byte; text is taken as UTF-8. Or a list of such.
        length: bytes to make, of each.
        temperature: divides the logits; 0 takes the likeliest byte.
        top_k: choose among so many of the likeliest bytes.
        top_p: then among the likeliest ones that together have at least this share.
        seed: of the random numbers; of several, each has its own stream of them.
        kv: what keys and values are kept in: `bf16`, `fp8` or `int8`; None is as activations.
        batch: of several, how many are made at once; None is as many as is usual. It changes no
            text.
        ahead: of a single prompt, bytes that a step makes at most, which are proposed and checked
            together; None is 1. It changes no text, and is faster on a GPU alone.

    Returns:
        The bytes that follow the prompt, or a list of them.

    Raises:
        ArbError: a prompt is empty, a number is out of range, or the model cannot check bytes.
    """
    from arbcli.device import deterministic
    from arbcli.infer import generation, several

    sampling = generation.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if isinstance(prompt, bytes | str):
        if batch is not None:
            raise ArbError("`batch` is for several prompts", hint="give a list of them")
        with deterministic():
            made = generation.generate(
                model, _bytes(prompt), length, sampling, kv=kv, ahead=1 if ahead is None else ahead
            )
            return b"".join(made)
    if ahead is not None:
        raise ArbError("`ahead` is for a single prompt", hint="leave it out, or give one prompt")
    requests = [
        several.Request(prompt=_bytes(each), length=length, sampling=sampling, stream=index)
        for index, each in enumerate(prompt)
    ]
    with deterministic():
        texts = dict(several.generate_several(model, requests, batch, kv=kv))
    return [texts[index] for index in range(len(requests))]


def _bytes(prompt: bytes | str) -> bytes:
    return prompt.encode() if isinstance(prompt, str) else prompt


def evaluate(
    model: "LanguageModel",
    data: Sequence[str],
    *,
    field: str | None = None,
    stride: int | None = None,
    batch: int = 16,
    kv: str | None = None,
) -> "EvaluateReport":
    """Measure how well a model predicts a text: see `arbcli.infer.evaluation.evaluate`.

    Args:
        model: from `load`.
        data: files, folders or globs, read as one text.
        field: of files of records, which has the text.
        stride: bytes from one window to the next; None is half a window.
        batch: windows at once.
        kv: what keys and values are rounded to, as `generate` keeps them.

    Raises:
        ArbError: the text or the stride does not do.
    """
    from arbcli.data import open_text
    from arbcli.infer import evaluation
    from arbcli.kernels.runtime.backend import default_backend
    from arbcli.plain_text import Conversion

    backend = default_backend(model.device)
    text, name = open_text(data, Conversion(field))
    return evaluation.evaluate(
        model, "", text, name, stride=stride, batch=batch, backend=backend, kv=kv
    )


def dense_weights(model: "LanguageModel") -> "dict[str, Tensor]":
    """Decode every packed matrix of a model, by its name.

    Returns:
        (outputs, inputs) float32 each, on the device of the model; they take 20 times the trits.
    """
    import torch

    return {name: part.weight(torch.float32) for name, part in model.weights().items()}
