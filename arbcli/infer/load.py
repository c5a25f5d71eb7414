"""A trained model from a run or a checkpoint."""

import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from arbcli.checkpoint import Accept, Checkpoint, check_layout, latest_checkpoint, load_checkpoint
from arbcli.config.checks import check_choice
from arbcli.config.model import Blocks, ModelConfig, StageConfig
from arbcli.config.presets import config_from_dict
from arbcli.device import COMPUTE, check_room, default_compute, resolve_device
from arbcli.errors import ArbError
from arbcli.infer.tokens import saved_tokenizer
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.output import printable
from arbcli.reading import check_schema, read_json
from arbcli.run_files import checkpoint_path


def load_model(
    path: Path | str, *, device: str | None = None, compute: str | None = None
) -> LanguageModel:
    """Load a trained model; a warning tells of each damaged checkpoint that is passed over.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        device: where to put it; None is the GPU if there is one.
        compute: dtype of activations; None is the one that the run was trained in.

    Returns:
        The model, ready to generate, evaluate or train on.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """

    def warn(message: str) -> None:
        warnings.warn(printable(message), stacklevel=2)

    model = load_named_model(Path(path), resolve_device(device), warn, compute)[0]
    model.register_forward_pre_hook(_take_any_integers)
    return model


def _take_any_integers(model: LanguageModel, inputs: tuple) -> tuple:
    """Convert bytes of any integer dtype, and refuse what is not a batch of them."""
    ids, *others = inputs
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"a model takes bytes as integers, and got {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(
            f"a model takes bytes of shape (batch, length), and got {tuple(ids.shape)}; of one text"
            " `ids[None]` is a batch"
        )
    return ids.long(), *others


def load_named_model(
    path: Path, place: torch.device, note: Callable[[str], None], compute: str | None = None
) -> tuple[LanguageModel, str]:
    """Load a trained model, and find out which checkpoint that is.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        place: where to put it.
        note: is told of each checkpoint that is passed over.
        compute: dtype of activations; None is the one that the run was trained in.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    if compute is not None:
        check_choice("compute", compute, COMPUTE)
    name, checkpoint = read_saved(path, note)
    dtype = COMPUTE[compute or _trained_in(name, checkpoint, place)]
    model = empty_model(checkpoint, place, dtype)
    model.load_state_dict(checkpoint.tensors)
    model.tokenizer = saved_tokenizer(name, checkpoint, model.config)
    return model, str(name)


@dataclass(frozen=True, eq=False)
class Weights:
    """A trained model without what only a step needs, and where it comes from."""

    model: LanguageModel
    """On the CPU, in float32."""
    checkpoint: Checkpoint
    """Checkpoint that it was read from; its tensors are those of the model."""
    path: Path
    """Of the checkpoint."""
    compute: str
    """Dtype of the activations in training."""

    @property
    def origin(self) -> str:
        """Digest of the checkpoint that training wrote, also where this is an export of it."""
        return self.checkpoint.data.get("origin", self.checkpoint.digest)


def load_weights(path: Path, note: Callable[[str], None]) -> Weights:
    """Load a trained model to be written in another form; training state is checked and forgotten.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        note: is told of each checkpoint that is passed over.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    name, checkpoint = read_saved(path, note, accept_weights)
    model = empty_model(checkpoint, weights_only=True)
    model.load_state_dict(checkpoint.tensors, assign=True)
    compute = _trained_in(name, checkpoint, torch.device("cpu"))
    return Weights(model, checkpoint, name, compute)


def accept_weights(checkpoint: Checkpoint) -> set[str]:
    """Refuse as `check_saved` does, and choose the tensors that are not training state."""
    check_saved(checkpoint)
    return set(empty_model(checkpoint, weights_only=True).state_dict())


def is_export(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has the weights only, as `arb export --to safetensors` writes it."""
    return "origin" in checkpoint.data


def check_trainable(checkpoint: Checkpoint) -> None:
    """Refuse what no run can begin with or go on from.

    Raises:
        ArbError: it has no state of rule and direction.
    """
    if is_export(checkpoint):
        raise ArbError(
            "the file only has weights, and no state to continue training from",
            hint="name a checkpoint of the run that was exported",
        )


def empty_model(
    checkpoint: Checkpoint,
    place: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    weights_only: bool = False,
) -> LanguageModel:
    """Make the model that a checkpoint fits, its weights not yet set.

    Args:
        checkpoint: what to fit.
        place: where to put it; None is torch's `meta` device.
        dtype: of activations.
        weights_only: leaves out what only a step needs, as an export does.

    Raises:
        ArbError: it is of no model that this version can make.
    """
    with place or torch.device("meta"):
        model = build_model(saved_config(checkpoint), dtype)
        if "wire" in checkpoint.data:
            model.declare_wire()
    if weights_only or is_export(checkpoint):
        model.drop_training_state()
    return model


class SavedModel(NamedTuple):
    """A checkpoint, and the path of its file."""

    path: Path
    checkpoint: Checkpoint


def read_saved(path: Path, note: Callable[[str], None], accept: Accept | None = None) -> SavedModel:
    """Read a checkpoint, or the newest intact one of a run, once it is known to be of a model.

    Args:
        path: a run directory, or a checkpoint.
        note: is told of each checkpoint that is passed over.
        accept: may refuse it; None is `check_saved`.

    Raises:
        ArbError: there is no checkpoint, or it is damaged, or of no model.
    """
    accept = accept or check_saved
    if not path.is_dir():
        return SavedModel(path, load_checkpoint(path, accept))
    checkpoint = latest_checkpoint(path, note, accept)
    return SavedModel(checkpoint_path(path, checkpoint.step), checkpoint)


def saved_config(checkpoint: Checkpoint) -> ModelConfig:
    """Find out what model a checkpoint is of.

    Raises:
        ArbError: of none that this version can make.
    """
    try:
        return config_from_dict(checkpoint.config)
    except TypeError as error:
        raise ArbError(
            f"it holds a model of another version of arb: {error}",
            hint="load it with the version that wrote it",
        ) from None


def _count_tensors(checkpoint: Checkpoint) -> int:
    """Count the tensors of the model that a checkpoint says it is of.

    As many blocks take time to build, a model is built that has each different block once.
    """
    config = saved_config(checkpoint)
    few = dataclasses.replace(config, stages=tuple(map(_with_few_blocks, config.stages)))
    smallest = dataclasses.replace(checkpoint, config=dataclasses.asdict(few))
    found = Counter(map(_block_of, empty_model(smallest).state_dict()))
    total = found.pop(None)
    for index, (stage, short) in enumerate(zip(config.stages, few.stages, strict=True)):
        names = (f"stages.{index}.encoder", f"stages.{index}.decoder")
        for name, blocks, distinct in zip(names, stage.lists, short.lists, strict=False):
            prefix = name if stage.chunking else "blocks"
            counts = {own: found[f"{prefix}.{at}"] for at, own in enumerate(distinct)}
            total += sum(counts[block] for block in blocks)
    return total


def _with_few_blocks(stage: StageConfig) -> StageConfig:
    """Keep each different block of a list once."""

    def few(blocks: Blocks) -> Blocks:
        return tuple(dict.fromkeys(blocks))

    memories = stage.memories and dataclasses.replace(stage.memories, place=0)
    return dataclasses.replace(
        stage,
        blocks=few(stage.blocks),
        before=few(stage.before),
        after=few(stage.after),
        memories=memories,
    )


def _block_of(name: str) -> str | None:
    """Name the block that a tensor belongs to, if it does to one."""
    found = re.match(r"(blocks|stages\.\d+\.(?:encoder|decoder))\.\d+", name)
    return found[0] if found else None


def check_saved(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors are not those of its own model, or too large; see `Accept`.

    A file alone takes no room: the model is built where tensors have no memory.

    Args:
        checkpoint: its tensors may be on `meta`.

    Raises:
        ArbError: it is refused.
    """
    tensors = checkpoint.tensors
    if len(tensors) != (wanted := _count_tensors(checkpoint)):
        raise ArbError(
            f"it has {len(tensors)} tensors, and the model of its configuration {wanted}",
            hint="it was altered: name another",
        )
    check_layout(tensors, empty_model(checkpoint).state_dict())
    size = sum(tensor.nbytes for tensor in tensors.values())
    check_room(2 * size, "to read it, and make its model,", "use a machine with more memory")


def _trained_in(file: Path, checkpoint: Checkpoint, place: torch.device) -> str:
    """Find the dtype of activations of a run, or of the device if a checkpoint lies alone."""
    path, hint = file.parent / "config.json", "give `--compute`"
    if is_export(checkpoint):  # which says it, wherever it lies
        says = checkpoint.data
        check_schema(says, {"compute": str}, f"`{file}`", hint)
    elif not path.exists():
        return default_compute(place)
    else:
        says = read_json(path, {"config": dict, "config.compute": str}, hint)["config"]
    check_choice("compute", says["compute"], COMPUTE)
    return says["compute"]
