"""Train byte-level language models whose whole persistent state is packed trits and int8.

docs/library.md describes this interface, with examples. Torch takes seconds to import, so each
function imports its dependencies when it is called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from arbcli.base.environment import BASELINES, set_environment
from arbcli.base.errors import ArbError
from arbcli.version import __version__ as __version__

if TYPE_CHECKING:
    from torch import Tensor

    from arbcli import nn as nn
    from arbcli.config.training import TrainConfig
    from arbcli.generation.evaluation import EvaluateReport
    from arbcli.model.language_model import LanguageModel
    from arbcli.nn import export_float as export_float
    from arbcli.nn import floats as floats
    from arbcli.nn import load_integers as load_integers
    from arbcli.nn import to_integers as to_integers
    from arbcli.training.observer import Observer
    from arbcli.training.record import TrainReport

_NN_NAMES = ("to_integers", "floats", "load_integers", "export_float")


def __getattr__(name: str) -> Any:
    """Import `arbcli.nn`, or one of its functions, on first use."""
    if name not in ("nn", *_NN_NAMES):
        raise AttributeError(f"module `arbcli` has no attribute `{name}`")
    set_environment()
    from importlib import import_module

    module = import_module("arbcli.nn")
    return module if name == "nn" else getattr(module, name)


def load(
    run: Path | str, *, device: str | None = None, compute: str | None = None
) -> "LanguageModel":
    """Load the model of a run, or of one checkpoint: see `arbcli.generation.load`."""
    set_environment()
    from arbcli.generation.load import load_model

    return load_model(run, device=device, compute=compute)


def configure(**settings: Any) -> "TrainConfig":
    """Return the configuration of a run: see `arbcli.training.configure`.

    Args:
        settings: options of `arb train` as keywords, with `_` for `-`: `preset`, `data`, `steps`,
            `lr`, `device`. `data` and `val` are paths, or lists of these.

    Raises:
        ArbError: settings are incompatible with each other or with this machine.
    """
    set_environment(spins=settings.get("weights") not in BASELINES)
    from arbcli.training.configure import new_config

    return new_config(**settings)


def train(
    config: "TrainConfig",
    out: Path | str | None = None,
    *,
    minutes: float | None = None,
    init_from: Path | str | None = None,
    observer: "Observer | None" = None,
) -> "TrainReport":
    """Train a model in a new directory: see `arbcli.training.run.start_run`.

    Args:
        config: from `configure`.
        out: directory to create; None is the next free one in `runs`.
        minutes: train for about this long; the number of steps follows from timing a few.
        init_from: run or checkpoint with the initial weights; see `saved_config` for its
            configuration.
        observer: receives records and messages; None discards them.

    Returns:
        The run's directory, losses and a sample of generated text.

    Raises:
        ArbError: a failure that the user can fix; earlier checkpoints stay intact.
    """
    from arbcli.training.observer import Observer
    from arbcli.training.run import start_run

    observer, initial = observer or Observer(), None
    if init_from is not None:
        from arbcli.generation.load import read_saved

        initial = read_saved(Path(init_from), observer.noted)
    folder = None if out is None else Path(out)
    return start_run(config, folder, observer, minutes=minutes, initial=initial)


def resume(
    run: Path | str,
    *,
    steps: int | None = None,
    observer: "Observer | None" = None,
    **changes: Any,
) -> "TrainReport":
    """Resume a run, or from a checkpoint in one: see `arbcli.training.resume.resume_run`.

    Args:
        run: a run directory, or a checkpoint in one.
        steps: new total number of steps; None keeps the run's own.
        observer: receives records and messages; None discards them.
        changes: new values of settings on which no weight depends, such as `save_every=500`.

    Raises:
        ArbError: there is no checkpoint to resume, the training text has changed, or a setting
            cannot change.
    """
    from arbcli.base.run_files import is_baseline

    set_environment(spins=not is_baseline(Path(run)))
    from arbcli.training.observer import Observer
    from arbcli.training.resume import resume_run

    return resume_run(Path(run), observer or Observer(), steps=steps, **changes)


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
    """Continue one prompt, or a batch of prompts; deterministic for a given seed.

    See `arbcli.generation.generation.generate`, and `arbcli.generation.batch` for batches.

    Args:
        model: from `load`.
        prompt: at least one byte, or a list of such prompts; a str is encoded as UTF-8.
        length: bytes to generate for each prompt.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from the k likeliest bytes.
        top_p: nucleus (top-p) sampling, applied after `top_k`.
        seed: seed of the random numbers; each prompt of a list has its own stream.
        kv: storage dtype of keys and values: `bf16`, `fp8` or `int8`; None is that of activations.
        batch: prompts of a list that are decoded together; None is the default of
            `arbcli.generation.batch`. The texts do not depend on it.
        ahead: speculative decoding of a single prompt: maximum number of bytes per step; None is
            1. The text does not depend on it, and it is only faster on a GPU.

    Returns:
        The generated bytes without the prompt, or a list of them in the order of the prompts.

    Raises:
        ArbError: a prompt is empty, a number is out of range, or the model cannot check bytes.
    """
    from arbcli.generation import generation
    from arbcli.generation.batch import Request, check_length, generate_batch
    from arbcli.generation.sampling import Sampling
    from arbcli.kernels.runtime.device import deterministic

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if ahead is not None and not isinstance(ahead, int):
        raise ArbError(f"`ahead` is {ahead!r}", "use a whole number")
    if isinstance(prompt, bytes | str):
        if batch is not None:
            raise ArbError("`batch` is for a list of prompts", "give a list, or leave it out")
        text, ahead = _bytes(prompt), 1 if ahead is None else ahead
        check_length(length, len(text))
        with deterministic():
            return b"".join(generation.generate(model, text, length, sampling, kv=kv, ahead=ahead))
    if ahead is not None:
        raise ArbError("`ahead` is for a single prompt", "leave it out, or give one prompt")
    requests = [
        Request(prompt=_bytes(text), length=length, sampling=sampling, stream=index)
        for index, text in enumerate(prompt)
    ]
    with deterministic():
        texts = dict(generate_batch(model, requests, batch, kv=kv))
    return [texts[index] for index in range(len(requests))]


def _bytes(prompt: bytes | str) -> bytes:
    return prompt.encode() if isinstance(prompt, str) else prompt


def evaluate(
    model: "LanguageModel",
    data: Path | str | Sequence[Path | str],
    *,
    field: str | None = None,
    data_format: str | None = None,
    stride: int | None = None,
    batch: int | None = None,
    kv: str | None = None,
) -> "EvaluateReport":
    """Measure how well a model predicts a text: see `arbcli.generation.evaluation.evaluate`.

    Args:
        model: from `load`.
        data: a file, folder or glob, or several, concatenated to one text.
        field: name of the text field in JSON and similar records.
        data_format: format of `.bin` files, as in `configure`.
        stride: bytes between the starts of two windows; None is half the context.
        batch: windows in a forward pass; None is 16, and fewer of long windows.
        kv: dtype to which keys and values are rounded, as in `generate`.

    Raises:
        ArbError: the text cannot be read or is too short, or a number is out of range.
    """
    from arbcli.data.files import Conversion, check_named, has_documents
    from arbcli.data.opening import open_text
    from arbcli.generation import evaluation
    from arbcli.kernels.runtime.backend import default_backend

    if has_documents(field):
        raise ValueError(f"`field` is {field!r}, and documents need a path to the model's template")
    backend = default_backend(model.device)
    entries = [*map(str, [data] if isinstance(data, Path | str) else data)]
    check_named(entries, field)
    text, name = open_text(entries, Conversion(field, data_format=data_format))
    return evaluation.evaluate(
        model, "", text, name, stride=stride, batch=batch, backend=backend, kv=kv
    )


def dense_weights(model: "LanguageModel") -> "dict[str, Tensor]":
    """Decode every packed matrix of a model.

    Returns:
        Name to (outputs, inputs) float32 on the model's device; 20 times the size of packed trits.
    """
    import torch

    return {name: part.weight(torch.float32) for name, part in model.weights().items()}
