"""Write `arbcli/verify/planted.json` from the faults that are planted.

`test_planted_faults.py` finds each of them by the check that the file names.
"""

import json
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from test_planted_faults import FAULTS, KINDS, OF_KERNELS, scale_type_of

from arbcli.verify.strength import PLANTED


def planted() -> str:
    """Make the file's content: for each class what it is, and what finds each of its faults."""
    rows = {}
    for kind, what in KINDS.items():
        found_by = [found_by_of(fault) for fault in FAULTS if fault.kind == kind]
        if found_by := [check for check in found_by if check]:
            rows[kind] = {"what": what, "found_by": found_by}
    return json.dumps(rows, indent=1) + "\n"


def found_by_of(fault) -> str | None:
    """Name the check of `arb verify-kernels` that finds a fault; None if that checks no such."""
    name, _, rest = fault.caught_by.partition(" ")
    if name in OF_KERNELS:
        return f"{name} {scale_type_of(name, rest) or ''}".strip()
    if name in ("checkpoint", "documents"):
        return None
    return f"model: {rest if name.endswith(':') else name}"


if __name__ == "__main__":
    PLANTED.write_text(planted(), encoding="utf-8")
