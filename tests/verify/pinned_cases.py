"""The cases of kernels and the models that are verified: a count and a digest of facts for each.

`python tests/verify/pinned_cases.py` writes them to `pinned_cases.txt`; `test_verifier.py`
compares. A case that is gone, smaller, or weaker (no zero any more, columns side by side, another
number) changes the line of its kernel. With names of kernels it prints the facts of their cases.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed
from arbcli.verify.check_kernels import KERNELS
from arbcli.verify.compare import poisoned
from arbcli.verify.kernels.update import newton_schulz
from arbcli.verify.models import MODELS
from arbcli.verify.subjects import Subject

WRITTEN = Path(__file__).with_suffix(".txt")
GROUP_SIZES = (6, 32)
"""Group sizes of scales in the cases of a kernel."""
DIGITS = 12
"""Number of digits of a stored digest."""


def facts_of(value: Any) -> Any:
    """List what decides how much an input shows; the last bits of its numbers do not.

    Of a tensor its dtype, shape, strides, place in memory and counts of special values, of floats
    the power of two of the largest, and of integers the largest and the smallest, or of wide ones
    their bits.
    """
    if isinstance(value, Packed):
        return [facts_of(part) for part in value]
    if not isinstance(value, Tensor):
        plain = value is None or isinstance(value, bool | int | float | str)
        return value if plain else type(value).__name__
    found = [str(value.dtype), *value.shape, *value.stride(), value.storage_offset()]
    if not value.numel():
        return found
    wide = value.double() if value.is_floating_point() else value.to(torch.int64)
    found += [int(wide.eq(0).sum()), int(wide.lt(0).sum())]
    if not value.is_floating_point():
        ends = int(wide.min()), int(wide.max())
        return [*found, *(ends if value.itemsize == 1 else map(int.bit_length, ends))]
    finite = wide[wide.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    return [*found, int(wide.isnan().sum()), int(wide.isinf().sum()), math.frexp(most)[1]]


def facts_of_kernel(spec: Any) -> list:
    """List the facts of all cases of a kernel."""
    sizes = GROUP_SIZES if spec.uses_scales else GROUP_SIZES[-1:]
    # memory that a kernel is to write is filled, and tests in the interpreter leave no case out
    with poisoned(), mock.patch.object(newton_schulz, "INTERPRETED", False):
        return [
            [size, case.label, case.chunk_elements, *map(facts_of, case.inputs)]
            for size in sizes
            for case in spec.cases(torch.device("cpu"), size)
        ]


def line_of(spec: Any) -> str:
    """Write a line on the cases of a kernel."""
    facts = facts_of_kernel(spec)
    return f"{spec.name}: {len(facts)} cases, {_digest(facts)}"


def _digest(facts: list) -> str:
    return sha256(json.dumps(facts).encode()).hexdigest()[:DIGITS]


def lines_of_models() -> Iterator[str]:
    """Write a line on each model that is compared."""
    for name, config in MODELS.items():
        subject = Subject(name, config, 2, torch.float32, torch.device("cpu"), "torch")
        drawn = [part.flatten().tolist() for part in subject.bytes()]
        yield f"model {name}: {_digest([dataclasses.asdict(config), *drawn])}"


if __name__ == "__main__":
    if sys.argv[1:]:
        for spec in KERNELS:
            for fact in facts_of_kernel(spec) if spec.name in sys.argv else ():
                sys.stdout.write(f"{json.dumps(fact)}\n")
    else:
        WRITTEN.write_text(
            "".join(f"{line}\n" for line in (*map(line_of, KERNELS), *lines_of_models())),
            encoding="utf-8",
        )
