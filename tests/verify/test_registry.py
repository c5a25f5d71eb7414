"""Every operation is verified once, by a layer that no kernel needs."""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

from syntax import kernel_files

import arbcli.kernels
import arbcli.verify.kernels
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.names import module_of, sources_of_kernels
from arbcli.verify.registry import BY_NAME

KERNELS, VERIFICATIONS = (
    Path(package.__file__).parent for package in (arbcli.kernels, arbcli.verify.kernels)
)
DECLARATION = re.compile(r'\bOperation\(\s*"(\w+)"')
OF_OTHERS = {"decode_weights", "merged_steps"}
"""Operations that launch kernels of others, which only their verification declares."""


def test_every_operation_has_one_verification():
    counts = Counter(id(verification.operation) for verification in BY_NAME.values())
    operations: dict[str, Operation] = {}
    for path in kernel_files():
        if names := DECLARATION.findall(path.read_text("utf-8")):
            values = vars(import_module(module_of(path))).values()
            declared = {value.name: value for value in values if isinstance(value, Operation)}
            operations |= {name: declared[name] for name in names}
    assert {name: counts[id(operation)] for name, operation in operations.items()} == dict.fromkeys(
        BY_NAME.keys() - OF_OTHERS, 1
    )
    assert set(counts.values()) == {1}


def test_files_of_verifications_are_named_like_those_of_operations():
    declared = {
        name: verifying_module(module_of(path))
        for path in kernel_files()
        for name in DECLARATION.findall(path.read_text("utf-8"))
    }
    verified = {name: module for module, names in sources_of_kernels() for name in names}
    assert {name: path for name, path in verified.items() if name not in OF_OTHERS} == declared
    verifying = {path.relative_to(VERIFICATIONS) for path in VERIFICATIONS.rglob("*.py")}
    kernels = {path.relative_to(KERNELS) for path in KERNELS.rglob("*.py")}
    assert verifying - kernels == {Path("update/merged_steps.py")}


def verifying_module(module: str) -> str:
    """Return the name of the module that verifies the operations of a module of kernels."""
    if module.startswith("arbcli.families."):
        return module.replace(".kernels.", ".verify.")
    return module.replace("arbcli.kernels.", "arbcli.verify.kernels.")
