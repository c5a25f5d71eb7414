"""A step as one CUDA graph: its phases, of which the device itself leaves some out.

torch captures a graph for each phase, and the driver joins them: a phase that leads deeper is
followed by a conditional node, whose body has the phases that are deeper. So the host launches a
step without having to know which of its phases run. torch has no function for conditional nodes in
all of the versions that are supported here, so the driver's own are called.
"""

import ctypes
import weakref
from collections import deque
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

OLDEST_DRIVER = 12040
"""Version of CUDA that a driver needs to know conditional nodes."""
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


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")


def _call(name: str, *arguments) -> None:
    """Call a function of the driver.

    Raises:
        RuntimeError: it refuses.
    """
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of the CUDA driver returned {status}")


def fits_step_graph() -> bool:
    """Whether the driver knows conditional nodes."""
    if torch.version.cuda is None:
        return False
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    return version.value >= OLDEST_DRIVER


class Part(NamedTuple):
    """A captured phase."""

    depth: int
    """As in `Phase`."""
    graph: torch.cuda.CUDAGraph
    """Of `keep_graph`; it is kept as long as the step, since what it computes in is its own."""
    handle: Tensor | None
    """Int64 of one element, which its last kernel reads; None is a phase that leads no deeper."""


class StepGraph:
    """The phases of a step, joined.

    Args:
        parts: in the order of the step; `handle` of each is written here.
        device: a GPU.

    Raises:
        RuntimeError: the driver refuses a call.
    """

    def __init__(self, parts: list[Part], device: torch.device) -> None:
        self._parts, self._device = parts, device
        self._context, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        graph = ctypes.c_void_p()
        _call("cuGraphCreate", ctypes.byref(graph), 0)
        try:
            self._fill(graph, deque(parts), 0)
            to, flags = ctypes.byref(self._executable), ctypes.c_ulonglong(0)
            _call("cuGraphInstantiateWithFlags", to, graph, flags)
        finally:
            _call("cuGraphDestroy", graph)
        weakref.finalize(self, _call, "cuGraphExecDestroy", self._executable).atexit = False

    def replay(self) -> None:
        """Launch the step on the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream))

    def _fill(self, graph: ctypes.c_void_p, parts: deque[Part], depth: int) -> None:
        """Add the parts from the first on that are this deep or deeper, one after another."""
        last = None
        while parts and parts[0].depth == depth:
            part = parts.popleft()
            last = self._add_part(graph, last, part)
            if part.handle is not None:
                body, last = self._add_condition(graph, last, part.handle)
                self._fill(body, parts, depth + 1)

    def _add_part(self, graph: ctypes.c_void_p, last: ctypes.c_void_p | None, part: Part):
        """Add a phase behind the last node; return its node."""
        node, captured = ctypes.c_void_p(), ctypes.c_void_p(part.graph.raw_cuda_graph())
        to = ctypes.byref(node)
        _call("cuGraphAddChildGraphNode", to, graph, *_after(last), captured)
        return node

    def _add_condition(self, graph: ctypes.c_void_p, last: ctypes.c_void_p, handle: Tensor):
        """Add a conditional node behind the last one; return its empty body, and the node."""
        found = ctypes.c_uint64()
        flags = ctypes.c_uint(0), ctypes.c_uint(0)  # what it is at first does not matter
        _call("cuGraphConditionalHandleCreate", ctypes.byref(found), graph, self._context, *flags)
        handle.fill_(found.value)
        params = _NodeParams(type=_CONDITIONAL, handle=found, condition=_IF, size=1)
        params.context = self._context
        node, (before, count) = ctypes.c_void_p(), _after(last)
        about = (before, None, count, ctypes.byref(params))
        _call("cuGraphAddNode_v2", ctypes.byref(node), graph, *about)
        return ctypes.c_void_p(params.bodies[0]), node


def _after(node: ctypes.c_void_p | None) -> tuple:
    """Name what a node depends on: an array of nodes, and how many there are."""
    before = None if node is None else ctypes.byref(node)
    return before, ctypes.c_size_t(0 if node is None else 1)
