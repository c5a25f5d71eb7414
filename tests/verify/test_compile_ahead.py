"""Kernels compile for GPUs that are not here, and what they need of them is read."""

import pytest

from arbcli.errors import ArbError
from arbcli.verify.compile_ahead import TARGETS, compile_kernels, find_excess, find_targets


def test_kernels_compile_for_a_gpu_that_is_not_here():
    found = compile_kernels(["step_scales", "gradient_gains"], ["sm_90"], 32, number=2)
    assert [result.kernel for result in found] == ["step_scales", "gradient_gains"]
    for result in found:
        assert result.passed, result.error
        assert result.variants >= 2
        assert 16 <= result.registers <= 128
        assert result.spill_bytes == 0
    assert found[1].shared_bytes > 0


@pytest.mark.slow
def test_launchers_choose_as_on_the_gpu_that_is_compiled_for():
    hopper, other = compile_kernels(["gram"], ["sm_90", "sm_120"], 32, number=2)
    assert hopper.passed, hopper.error
    assert other.passed, other.error
    assert other.shared_bytes < 99 << 10 < hopper.shared_bytes


def test_spills_and_shared_memory_have_limits():
    target = TARGETS["sm_120"]
    assert find_excess(16, 99 << 10, target) is None
    assert "20 bytes of registers" in find_excess(20, 0, target)
    assert "do not fit in 101376" in find_excess(0, (99 << 10) + 1, target)


def test_targets_are_found_by_name():
    assert find_targets("all") == list(TARGETS)
    assert find_targets("sm_80, gfx942") == ["sm_80", "gfx942"]
    with pytest.raises(ArbError, match="no target is named `sm_70`"):
        find_targets("sm_70")
