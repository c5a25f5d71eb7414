"""Planted faults that the checks are known to catch.

`planted.json`, next to this file, lists them. The tests plant them one at a time, and the check
that is listed for a fault must detect it. `python tests/write_planted.py` writes the list.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from arbcli.verify.check_kernels import KernelResult
from arbcli.verify.subjects import ParityResult

PLANTED = Path(__file__).with_name("planted.json")


@dataclass(frozen=True, slots=True)
class Strength:
    """A class of mistakes, and how much of it the checks that were made are known to catch."""

    kind: str
    what: str
    """The mistake, in words."""
    planted: int
    """Faults of this class that were planted, and found by one check of the whole."""
    caught: int
    """Faults that a check of this run found."""
    by: tuple[str, ...]
    """These checks: kernels, with the scale type if they have scales, and `model: NAME`."""


def find_strength(
    kernels: Iterable[KernelResult], parity: Iterable[ParityResult]
) -> tuple[Strength, ...]:
    """Count the planted faults of each class that the executed checks are known to catch.

    A kernel counts if its fixed cases ran in the scale type in which its fault was found, in the
    kernel and in the torch backend: faults are in either of them. Random cases were not tried.
    """
    ran: dict[str, set[bool]] = {}
    for result in kernels:
        if result.kind == "cases" and result.backend != "native":
            check = f"{result.kernel} {result.scale_type or ''}".strip()
            ran.setdefault(check, set()).add(result.backend == "torch")
    made = {check for check, backends in ran.items() if len(backends) == 2}
    made |= {f"model: {result.check}" for result in parity}
    found = []
    for kind, row in json.loads(PLANTED.read_text(encoding="utf-8")).items():
        by = [check for check in row["found_by"] if check in made]
        checks = tuple(dict.fromkeys(by))
        found.append(Strength(kind, row["what"], len(row["found_by"]), len(by), checks))
    return tuple(found)


def strength_text(strength: Iterable[Strength]) -> str:
    """Summarise all classes in a line."""
    strength = list(strength)
    caught, planted = sum(s.caught for s in strength), sum(s.planted for s in strength)
    kinds = sum(s.caught > 0 for s in strength)
    return (
        f"these checks are known to catch {caught} of {planted} planted faults, of {kinds} of"
        f" {len(strength)} classes of mistakes"
    )
