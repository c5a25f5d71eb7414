"""A record of the operations of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NotedOperations(TorchDispatchMode):
    """Calls `note` with the name of each operation and each tensor that it returns."""

    def __init__(self, note: Callable[[str, torch.Tensor], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        results = func(*args, **(kwargs or {}))
        for part in tree_leaves(results):
            if isinstance(part, torch.Tensor):
                self.note(func._schema.name.removeprefix("aten::"), part)
        return results
