"""Kernels in Triton are verified in a scale type of each of their paths."""

import ast

import pytest
from syntax import kernel_files, parsed, walk

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.verify.registry import KERNELS
from arbcli.verify.scale_types import ALWAYS, verified_scale_types

WITH_SCALES = [spec for spec in KERNELS if spec.uses_scales]

PATHS = {
    "GROUP % 32 == 0", "group_size % PLANE == 0", "group_size == PLANE",
    "GROUP == LANES", "group_size >= 8",
}  # fmt: skip
"""Conditions of code on a group size: each is in the `scale_path` of the kernels that ask it."""
MASKS = {
    "within < GROUP", "group * GROUP < D", "lane % LANES < GROUP",
    "whole * group_size < in_features",
}  # fmt: skip
"""Conditions that do not select code, or that `scale_path` expresses in another form."""


def test_conditions_on_group_sizes_are_known():
    """Another question belongs in the `scale_path` of the kernels whose code it divides."""
    asked = set()
    for file in kernel_files():
        for function in walk(parsed(file)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in (node for node in walk(function) if isinstance(node, ast.Compare)):
                words = {getattr(part, "id", getattr(part, "attr", "")) for part in walk(node)}
                if words & {"GROUP", "group_size"}:
                    asked.add(ast.unparse(node))
    assert asked == PATHS | MASKS


@pytest.mark.parametrize("spec", WITH_SCALES, ids=lambda spec: spec.name)
def test_every_path_of_a_kernel_is_in_its_sample(spec):
    chosen = verified_scale_types(spec, SCALE_TYPES)
    assert {*ALWAYS} <= {*chosen} < {*SCALE_TYPES}
    paths = {name: spec.scale_path(size) for name, size in SCALE_TYPES.items()}
    assert {paths[name] for name in chosen} == {*paths.values()}
