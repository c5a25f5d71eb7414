"""Tree of a model's parts, with path, description and size of each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arbcli.config.model import ModelConfig, StageConfig
from arbcli.config.model_file import given_fields

if TYPE_CHECKING:
    from torch.nn import Module

    from arbcli.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A part, or several equal ones that follow one another."""

    path: str
    """Name of its module. Several blocks have the first and the last number, as in `blocks.2-8`, or
    `blocks.2-8 by 2` if other blocks are between them."""
    depth: int
    """Depth in the tree: number of enclosing parts."""
    count: int
    """Number of equal parts; weights and bytes are those of all of them."""
    kind: str
    shape: str
    """Description: settings that differ from the default, or sizes of matrices."""
    weights: int
    """Logical weights, those of norms among them."""
    bytes: int
    """Size of the part's state in bytes."""
    lr_factors: tuple[float, ...]
    """Factor of the learning rate of its matrices."""


def list_parts(model: "LanguageModel") -> tuple[PartReport, ...]:
    """List the parts of a model in the order of its modules, each before those inside of it.

    Those of depth 0 make up the model.

    Args:
        model: a model, possibly on `meta`.
    """
    return tuple(_parts(model, model.config))


def _parts(model: "LanguageModel", config: ModelConfig) -> Iterator[PartReport]:
    configs = _configs(config)
    for name, module in model.named_children():
        if name == "stages":
            for index, (stage, chunking) in enumerate(
                zip(module.children(), config.chunkings, strict=True)
            ):
                path, stage_config = f"stages.{index}", config.stages[index]
                fields = _stream(stage_config)
                fields |= {"boundaries": chunking.boundaries, "length": chunking.length}
                yield _part(path, [stage], kind="stage", shape=_format_fields(fields))
                for child, part in stage.named_children():
                    blocks = {"encoder": stage_config.before, "decoder": stage_config.after}.get(
                        child
                    )
                    if blocks is None:
                        yield _part(f"{path}.{child}", [part], depth=1)
                    else:
                        yield from _blocks(f"{path}.{child}", part, blocks)
        elif name == "blocks":
            main = config.main
            yield _part(name, [module], kind="stage", shape=_format_fields(_stream(main)))
            yield from _blocks(name, model.blocks, main.blocks)
        elif name == "head" and config.tied:
            yield _part(name, [module], kind=name, shape="that of the embedding")
        else:
            yield _part(name, [module], config=configs.get(name))


def _stream(stage: StageConfig) -> dict[str, Any]:
    """Return the fields of a stage's stream; optional ones if they differ from the default."""
    fields: dict[str, Any] = {"dim": stage.dim, "streams": stage.streams}
    if stage.contribution != 1:
        fields["contribution"] = stage.contribution
    return fields | ({} if stage.bound is None else {"bound": stage.bound})


def _configs(config: ModelConfig) -> dict[str, Any]:
    """Return the configurations of the parts outside stages, by the names of their modules."""
    configs: dict[str, Any] = {part.kind: part for part in config.beside}
    memories: Any = config.main.memories
    if memories:
        configs |= memories.codebooks | {"moe_graph": memories.iterated}
    return configs | {"byte_mlp": config.head, "ahead": config.ahead, "head": config.composite}


def _blocks(path: str, stack: "Module", configs: Iterable[Any]) -> Iterator[PartReport]:
    """Yield the reports of blocks and their parts; a run of equal or alternating blocks is one."""
    configs, all_blocks = list(configs), [*stack.children()]
    for numbers in _repeated_blocks(configs):
        blocks, ends = [all_blocks[number] for number in numbers], str(numbers.start)
        if len(numbers) > 1:
            ends += f"-{numbers[-1]}" + (f" by {numbers.step}" if numbers.step > 1 else "")
        prefix = f"{path}.{ends}"
        yield _part(prefix, blocks, depth=1, kind="block", shape="")
        for part, branches in zip(
            configs[numbers.start].parts,
            zip(*(block.branches for block in blocks), strict=True),
            strict=True,
        ):
            name = branches[0].part.name
            yield _part(f"{prefix}.{name}", branches, depth=2, config=part)


def _repeated_blocks(configs: list[Any]) -> Iterator[range]:
    """Yield the indices of repeated blocks: runs of equal blocks, or of a repeated pattern.

    A pattern is as short as possible, and is repeated at least once.
    """
    start = 0
    while start < len(configs):
        for period in range(1, len(configs)):
            end = start + period
            while end < len(configs) and configs[end] == configs[end - period]:
                end += 1
            if end >= start + 2 * period:
                break
        else:
            period, end = 1, start + 1
        yield from (range(start + offset, end, period) for offset in range(period))
        start = end


def _part(
    path: str,
    modules: Iterable[Any],
    *,
    depth: int = 0,
    config: Any = None,
    kind: str | None = None,
    shape: str | None = None,
) -> PartReport:
    """Add up equal parts, each a module or several of them."""
    modules = list(modules)
    tensors = [tensor for module in modules for tensor in _state_of(module)]
    trained = [tensor for tensor in tensors if not getattr(tensor, "frozen", True)]
    if shape is None and config is not None:
        shape = _format_fields(given_fields(config))
    if shape is None:
        first = [tensor for tensor in _state_of(modules[0]) if not getattr(tensor, "frozen", True)]
        shape = ", ".join(f"{weight.out_features:,} x {weight.in_features:,}" for weight in first)
    if kind is None:
        kind = config.kind if config else path.rpartition(".")[2] if trained else "norm"
    return PartReport(
        path=path,
        depth=depth,
        count=len(modules),
        kind=kind,
        shape=shape,
        weights=sum(getattr(tensor, "num_weights", 0) for tensor in tensors),
        bytes=sum(getattr(tensor, name).nbytes for tensor in tensors for name in tensor.kinds),
        lr_factors=tuple(sorted({tensor.lr_factor for tensor in trained})),
    )


def _state_of(part: "Module | tuple[Module | None, ...]") -> list[Any]:
    """List the modules that declare state, in a module or in several."""
    from arbcli.model.packed import StateModule, Weight  # torch takes seconds to import

    modules = filter(None, part) if isinstance(part, tuple) else (part,)
    inside = (child for module in modules for child in module.modules())
    return [child for child in inside if isinstance(child, StateModule | Weight)]


def _format_fields(fields: dict[str, Any]) -> str:
    """Write fields and their values: `heads 12, shared, no sub norm`."""
    words = []
    for name, value in fields.items():
        text = name.replace("_", " ")
        if name == "kind" or (name == "streams" and value == 1):
            continue
        if isinstance(value, dict):
            words.append(f"{text} ({_format_fields(value)})")
        elif isinstance(value, bool):
            words.append(text if value else f"no {text}")
        elif isinstance(value, list):
            words.append(f"{text} {' x '.join(map(str, value))}")
        else:
            words.append(f"no {text}" if value is None else f"{text} {value}")
    return ", ".join(words)
