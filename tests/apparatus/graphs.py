"""CUDA graphs without a GPU: the operations of torch are noted, and done again by a replay.

As on a GPU, recording changes no tensor, and a replay reads and writes the memory that was
recorded. What Python does meanwhile is done once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.check_kernels import copies


class Graph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    made: ClassVar[list["Graph"]] = []
    recording: ClassVar[list["Graph"]] = []

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()
        self.noted: list[tuple] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.replays = 0
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        about = {argument.name: argument for argument in func._schema.arguments}
        given = dict(zip(about, args, strict=False)) | kwargs
        for name, value in given.items():
            if about[name].alias_info is not None and about[name].alias_info.is_write:
                for tensor in tree_leaves(value):
                    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                    self.before.setdefault(whole.data_ptr(), (whole, whole.clone()))
        results = func(*args, **kwargs)
        noted = (func, args, kwargs, results)
        self.noted.append(tree_map_only(torch.Tensor, torch.Tensor.detach, noted))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self.noted:
            again = func(*args, **kwargs)
            for result, other in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(result, torch.Tensor) and result.data_ptr() != other.data_ptr():
                    result.copy_(other)

    def pool(self) -> None:
        """Have no memory of its own."""

    def reset(self) -> None:
        self.noted.clear()


def _noting(operation: Callable) -> Callable:
    """Make an operation of ours one of a graph: it may read numbers when it is replayed."""

    def call(*given: Any, **named: Any) -> Any:
        if not Graph.recording:
            return operation(*given, **named)
        with _disable_current_modes():
            results = operation(*copies(given), **named)
        Graph.recording[-1].noted.append((operation, given, named, results))
        return results

    return call


@contextmanager
def _capturing(graph: Graph, **_options: Any) -> Iterator[None]:
    Graph.recording.append(graph)
    with graph:
        yield
    Graph.recording.pop()
    for whole, before in graph.before.values():
        whole.copy_(before)


@contextmanager
def recorded_graphs() -> Iterator[list[Graph]]:
    """Record graphs on a CPU, and list them as they are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "made", [])
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(Operation, "__call__", _noting(Operation.__call__))
        for module in ("generation.decoder", "training.trainer"):
            patch.setattr(f"arbcli.{module}.capturing", _capturing)
        yield Graph.made
