"""A decoding step as one CUDA graph, with conditional nodes for phases that may be skipped.

torch captures a graph for each phase. The graphs are joined with driver calls: a phase that may
lead deeper is followed by a conditional node, whose body has the deeper phases, so that the host
can launch a step without knowing which phases run. The driver is called directly, as not all
supported versions of torch have conditional nodes.
"""

import ctypes
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.runtime.conditions import driver
from arbcli.model.decoding import Phase

_CONDITIONAL, _IF = 13, 0
"""Node type and condition type in the driver's header."""


class _NodeParams(ctypes.Structure):
    """The driver's `CUgraphNodeParams` for a conditional node."""

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
    """Call a driver function.

    Raises:
        RuntimeError: it returns an error.
    """
    status = getattr(driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of the CUDA driver returned {status}")


class StepGraph:
    """The executable graph of a step.

    Args:
        phases: phases of the step in order; their `handle` tensors are set.
        graphs: the graphs of the phases, captured with `keep_graph`. They are kept alive, as they
            own the memory pool.
        device: a GPU.

    Raises:
        RuntimeError: a driver call failed.
    """

    def __init__(
        self, phases: list[Phase], graphs: list[torch.cuda.CUDAGraph], device: torch.device
    ) -> None:
        self._graphs, self._device = graphs, device
        self._context, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        graph = ctypes.c_void_p()
        _call("cuGraphCreate", ctypes.byref(graph), 0)
        try:
            self._fill(graph, deque(zip(phases, graphs, strict=True)), 0)
            to, flags = ctypes.byref(self._executable), ctypes.c_ulonglong(0)
            _call("cuGraphInstantiateWithFlags", to, graph, flags)
        finally:
            _call("cuGraphDestroy", graph)
        weakref.finalize(self, _call, "cuGraphExecDestroy", self._executable).atexit = False

    def replay(self) -> None:
        """Launch the step on the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream))

    def _fill(self, parent: ctypes.c_void_p, parts: deque, depth: int) -> None:
        """Add the next phases of at least this depth to a graph, in sequence."""
        last = None
        while parts and parts[0][0].depth == depth:
            phase, graph = parts.popleft()
            node, captured = ctypes.c_void_p(), ctypes.c_void_p(graph.raw_cuda_graph())
            to = ctypes.byref(node)
            _call("cuGraphAddChildGraphNode", to, parent, *_dependencies(last), captured)
            last = node
            if phase.leads_deeper is not None:
                body, last = self._add_condition(parent, last, phase.handle)
                self._fill(body, parts, depth + 1)

    def _add_condition(
        self, graph: ctypes.c_void_p, last: ctypes.c_void_p, handle: Tensor
    ) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Add a conditional node after the last one; return its empty body, and the node."""
        condition = ctypes.c_uint64()
        flags = ctypes.c_uint(0), ctypes.c_uint(0)  # no default value
        _call(
            "cuGraphConditionalHandleCreate", ctypes.byref(condition), graph, self._context, *flags
        )
        handle.fill_(ctypes.c_int64(condition.value).value)
        params = _NodeParams(type=_CONDITIONAL, handle=condition, condition=_IF, size=1)
        params.context = self._context
        node, (dependencies, count) = ctypes.c_void_p(), _dependencies(last)
        _call(
            "cuGraphAddNode_v2", ctypes.byref(node), graph, dependencies, None, count,
            ctypes.byref(params),
        )  # fmt: skip
        return ctypes.c_void_p(params.bodies[0]), node


def _dependencies(node: ctypes.c_void_p | None) -> tuple:
    """Return a node's dependencies as an array and its length."""
    dependencies = None if node is None else ctypes.byref(node)
    return dependencies, ctypes.c_size_t(0 if node is None else 1)
