"""Scale types in which kernels in Triton are verified.

Compiling a kernel for another group size takes seconds, and so does interpreting it. On a CPU the
torch and native backends run in every scale type.
"""

from collections.abc import Hashable, Iterable

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.verify.verification import Verification

DEFAULT_SCALE_TYPE = "T32"
"""The one in which models are trained by default."""
ALWAYS = (DEFAULT_SCALE_TYPE, "T6")
"""In every verification: groups are planes of a block in one, and straddle all in the other.
Planted faults are looked for in these."""
TRITON_BACKENDS = ("triton", "interpreter")
"""Backends that run a kernel in some scale types only."""


def verified_scale_types(spec: Verification, scale_types: Iterable[str]) -> tuple[str, ...]:
    """Choose the scale types for Triton: `ALWAYS`, and one of each other path of the kernel."""
    path_types: dict[Hashable, str] = {}
    for name in sorted(scale_types, key=lambda name: name not in ALWAYS):
        path_types.setdefault(spec.scale_path(SCALE_TYPES[name]), name)
    kept = {*ALWAYS, *path_types.values()}
    return tuple(sorted(kept & {*scale_types}, key=lambda name: (name not in ALWAYS, name)))
