"""Every class of mistake, planted once on purpose in kernels, updates and models: caught.

The author of a check of `arb verify-kernels` wants to know that it would notice, also after it is
made cheaper. `planted_faults.txt` has one of each class, one for every kernel that its cases
notice, and one for every check of a model. `planting` says how.
"""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from apparatus.planting import Fault
from apparatus.sampling import sample

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.verify import models, parity
from arbcli.verify.check_kernels import copies, find_kernels, peers_of
from arbcli.verify.compare import as_tuple, compare, poisoned
from arbcli.verify.models import RAGGED
from arbcli.verify.registry import KERNELS
from arbcli.verify.subjects import Subject, several_rules

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels refuse globals that change"
    ),
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
]
CPU = torch.device("cpu")

RECORDED = Path(__file__).with_name("planted_faults.txt").read_text(encoding="utf-8")
FAULTS = [
    Fault(*fault)
    for fault in re.findall(r"^(.+), in (\S+):\n    `(.*)` becomes `(.*)`$", RECORDED, re.MULTILINE)
]
"""The check that must fail, a function, a piece of its source, and the replacement of the piece."""


def failures(check: str) -> list:
    """Make one check, and list what it finds wrong."""
    model, colon, part = check.partition(": ")
    if colon:
        return check_one(model, part)
    kind, *about = check.split()
    return check_update(*about) if kind == "update" else kernel_failures(kind, *about)


def check_one(name: str, check: str) -> list:
    """Make one of the checks of a model, as far as the first result that fails."""
    parts = {"output": "blocks", "gradient": "blocks"}.get(check, "whole")
    config = RAGGED if name == "ragged" else models.MODELS[name]
    subject = Subject(name, config, 2, torch.float32, CPU, "torch", (parts,))
    make = parity._causality if check == "causality" else parity._compare
    with deterministic(), poisoned(warn_only=False):
        failed = (r for r in make(subject) if r.check == check and not r.passed)
        return [*islice(failed, 1)]


def check_update(rule: str, direction: str) -> list:
    """Compare updates of one rule, or of `several` in one model, with their formulas."""
    if rule == "several":
        config = several_rules(direction)
    else:
        config = replace(RAGGED, rule=rule, direction=direction)
    subject = Subject(rule, config, 1, torch.float32, CPU, "torch", ("update",))
    return [result for result in parity.check_model(subject) if not result.passed]


def kernel_failures(name: str, scale_type: str = "") -> list:
    """Compare a kernel with its reference as far as the first case of a sample that it fails.

    With the scales that test_every_kernel.py finds nothing with: T6, in which groups straddle
    everything, T32 for norms; or with those that are named.
    """
    (spec,) = find_kernels([name])
    usual = "T32" if spec.uses_scales and "norm" in name else "T6"
    group_size = SCALE_TYPES[scale_type or usual]
    with poisoned():
        for case in sample(list(spec.cases(CPU, group_size))):
            wanted = as_tuple(spec.reference(*copies(case.inputs)))
            peers = peers_of(spec, case, len(wanted))
            for backend, run in (("interpreter", spec.triton), ("torch", spec.torch)):
                with use_backend(backend):
                    got = as_tuple(run(*copies(case.inputs)))
                results = [
                    compare(spec, case.label, *outputs)
                    for outputs in zip(got, wanted, peers, strict=True)
                ]
                if failed_results := [result for result in results if not result.passed]:
                    return failed_results
    return []


OF_KERNELS = {spec.name for spec in KERNELS}
"""Kernels without a fault are tested in tests/kernels/test_every_kernel.py."""


@pytest.mark.slow  # tests/verify/test_parity.py finds nothing either
def test_nothing_is_found_without_a_fault():
    for check in {fault.caught_by for fault in FAULTS}:
        assert check.split()[0] in OF_KERNELS or not failures(check), check


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.caught_by}: {fault.old}")
def test_planted_fault_is_caught(fault, tmp_path):
    with fault.planted(tmp_path):
        assert failures(fault.caught_by)


def test_every_kernel_has_a_fault_and_every_line_is_read():
    lines = [line for line in RECORDED.splitlines() if line and not line.startswith("#")]
    assert 2 * len({*FAULTS}) == len(lines)
    assert {fault.caught_by.split()[0] for fault in FAULTS} >= OF_KERNELS
