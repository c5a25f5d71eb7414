"""A step as one CUDA graph: its phases, of which the device itself leaves some out.

torch captures a graph for each phase, and the driver joins them: a phase that leads deeper is
followed by a conditional node, whose body has the phases that are deeper. So the host launches a
step without having to know which of its phases run. torch has no function for conditional nodes in
all of the versions that are supported here, so the driver's own are called.
"""

import ctypes
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.runtime.conditions import driver
from arbcli.model.language_model import Phase

_CONDITIONAL, _IF = 13, 0
"""A type of nodes, and a type of conditions, in the driver's header."""


class _NodeParams(ctypes.Structure):
    """The driver's `CUgraphNodeParams`, of a conditional node."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("condition", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("of_other_types", ctypes.c_longlong * 26),
    )


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        RuntimeError: it refuses.
    """
    status = getattr(driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of the CUDA driver returned {status}")


class StepGraph:
    """The phases of a step, joined.

    Args:
        phases: in the order of the step; `handle` of each is written here.
        graphs: that torch captured of them, of `keep_graph`. They are kept as long as the step,
            since what they compute in is theirs.
        device: a GPU.

    Raises:
        RuntimeError: the driver refuses a call.
    """

    def __init__(
        self, phases: list[Phase], graphs: list[torch.cuda.CUDAGraph], device: torch.device
    ) -> None:
        self._graphs, self._device = graphs, device
        self._context, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        whole = ctypes.c_void_p()
        _call("cuGraphCreate", ctypes.byref(whole), 0)
        try:
            self._fill(whole, deque(zip(phases, graphs, strict=True)), 0)
            to, flags = ctypes.byref(self._executable), ctypes.c_ulonglong(0)
            _call("cuGraphInstantiateWithFlags", to, whole, flags)
        finally:
            _call("cuGraphDestroy", whole)
        weakref.finalize(self, _call, "cuGraphExecDestroy", self._executable).atexit = False

    def replay(self) -> None:
        """Launch the step on the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream))

    def _fill(self, whole: ctypes.c_void_p, parts: deque, depth: int) -> None:
        """Add phases from the first on that are this deep or deeper, one after another."""
        last = None
        while parts and parts[0][0].depth == depth:
            phase, graph = parts.popleft()
            node, captured = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
            to = ctypes.byref(node)
            _call("cuGraphAddChildGraphNode", to, whole, *_after(last), captured)
            last = node
            if phase.leads_deeper is not None:
                body, last = self._add_condition(whole, last, phase.handle)
                self._fill(body, parts, depth + 1)

    def _add_condition(
        self, whole: ctypes.c_void_p, last: ctypes.c_void_p, handle: Tensor
    ) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Add a conditional node after the last one; return its empty body, and the node."""
        found = ctypes.c_uint64()
        flags = ctypes.c_uint(0), ctypes.c_uint(0)  # what it is at first does not matter
        _call("cuGraphConditionalHandleCreate", ctypes.byref(found), whole, self._context, *flags)
        handle.fill_(ctypes.c_int64(found.value).value)
        params = _NodeParams(type=_CONDITIONAL, handle=found, condition=_IF, size=1)
        params.context = self._context
        node, (before, count) = ctypes.c_void_p(), _after(last)
        _call(
            "cuGraphAddNode_v2", ctypes.byref(node), whole, before, None, count,
            ctypes.byref(params),
        )  # fmt: skip
        return ctypes.c_void_p(params.bodies[0]), node


def _after(node: ctypes.c_void_p | None) -> tuple:
    """Name what a node depends on: an array of nodes, and how many there are."""
    before = None if node is None else ctypes.byref(node)
    return before, ctypes.c_size_t(0 if node is None else 1)
