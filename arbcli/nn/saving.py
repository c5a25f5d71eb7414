"""Folders of models of Transformers with integer weights, and with floats for other programs."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.base.errors import ArbError, library_errors
from arbcli.base.reading import ALTERED, read_json
from arbcli.base.run_files import CONFIG
from arbcli.nn.convert import KEY, MARK, ORIGIN, convert
from arbcli.nn.layers import SUFFIX, IntegerModule
from arbcli.nn.weights import check_dtype

GENERATION = "generation_config.json"
"""Settings of `model.generate` in a folder of Transformers."""


def load_integers(
    folder: Path | str, *, device: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """Load a model of Transformers from a folder that `save_pretrained` wrote with integers.

    Args:
        folder: the folder.
        device: device of the weights; None is the CPU.
        dtype: dtype that weights are decoded to; None is the one that the model had.

    Returns:
        The model, in evaluation mode. `arbcli.nn.IntegerOptimizer` trains it.

    Raises:
        ArbError: the folder has no integers, or does not fit the installed version.
    """
    import transformers

    folder = Path(folder)
    mark = read_json(folder / CONFIG).get(MARK)
    if not isinstance(mark, dict) or KEY not in mark:
        raise ArbError(
            f"`{folder}` has no integer weights",
            "load it with Transformers, and convert it with `arbcli.to_integers`",
        )
    configuration = transformers.AutoConfig.from_pretrained(folder)
    delattr(configuration, MARK)
    (name,) = configuration.architectures
    if not hasattr(transformers, name):
        raise ArbError(
            f"Transformers {transformers.__version__} has no class `{name}`",
            "build the model, call `arbcli.to_integers` and `model.load_state_dict`",
        )
    dtype = dtype or configuration.dtype or torch.float32
    model = getattr(transformers, name)._from_config(configuration, dtype=dtype)
    check_dtype(model.dtype)
    convert(model, mark[KEY], rounds=False)
    _read_into(model, folder)
    if (folder / GENERATION).exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return (model if device is None else model.to(device)).eval()


def _read_into(model: nn.Module, folder: Path) -> None:
    """Copy the tensors of a folder to a model, one at a time."""
    from safetensors import safe_open

    state = model.state_dict(keep_vars=True)
    read = set()
    for path in sorted(folder.glob("*.safetensors")):
        with library_errors(f"`{path}` cannot be read", ALTERED), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                tensor = file.get_tensor(name)
                if name not in state or state[name].shape != tensor.shape:
                    raise ArbError(f"`{path}`: `{name}` does not fit the model", ALTERED)
                part = state.pop(name)
                part.detach().copy_(tensor)
                read.add(id(part))
    # tied floats are saved by one of their names
    missing = [name for name, part in state.items() if id(part) not in read]
    if missing:
        raise ArbError(f"`{folder}` has no `{missing[0]}`", ALTERED)


def float_state_dict(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Decode the state of a model to floats, with the names that it had before its conversion.

    Args:
        model: a model with integer weights.
        dtype: dtype of the floats.

    Returns:
        Tensors on the CPU by name, of their shapes before the conversion; tied weights are one
        tensor with several names.
    """
    names = {
        f"{name}.{weight}" if name else weight: packed
        for name, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, IntegerModule)
        for weight, packed in part._packed.items()
    }
    decoded: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, packed in names.items():
            if id(packed) not in decoded:
                decoded[id(packed)] = packed.decoded().to("cpu", dtype, copy=True).contiguous()
            state[name] = decoded[id(packed)]
    for name, value in model.state_dict().items():
        if not any(name.startswith(f"{prefix}{SUFFIX}.") for prefix in names):
            state[name] = value.to("cpu", dtype if value.is_floating_point() else value.dtype)
    return state


def export_float(model: Any, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a model of Transformers with float weights, which other programs load.

    Args:
        model: a model of Transformers with integer weights.
        folder: folder to write.
        dtype: dtype of the weights; bfloat16 holds all digits.

    Raises:
        ArbError: the model is not one of Transformers, or was not converted.
    """
    if not hasattr(model, "save_pretrained"):
        raise ArbError(
            f"`{type(model).__name__}` has no `save_pretrained`",
            "save the result of `arbcli.nn.float_state_dict(model)`",
        )
    if not hasattr(model, "_float_conversions"):
        raise ArbError(
            "the model itself was not converted to integers",
            "pass the model that `arbcli.to_integers` converted",
        )
    configuration, conversions = model.config, model._weight_conversions
    model.config = copy.deepcopy(configuration)
    model._weight_conversions = model._float_conversions
    try:
        vars(model.config).pop(MARK, None)
        model.config.dtype = dtype
        setattr(model.config, ORIGIN, "arbcli.nn")
        model.save_pretrained(folder, state_dict=float_state_dict(model, dtype))
    finally:
        model.config, model._weight_conversions = configuration, conversions
