"""Every operation is verified once, by a layer that no kernel needs."""

import re
from collections import Counter
from importlib import import_module

from syntax import kernel_files

from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.names import module_of
from arbcli.verify.registry import BY_NAME

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
