"""Kernels compile for GPUs that are not here, and what they need of them is read."""

from types import SimpleNamespace

import pytest
import torch
from marks import needs_triton

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime.backend import compile_for
from arbcli.verify import compile_ahead
from arbcli.verify.check_kernels import find_kernels
from arbcli.verify.compile_ahead import TARGETS, compile_kernels, find_excess, find_targets
from arbcli.verify.variants import Launch, variant_of


@pytest.mark.slow
def test_kernels_compile_for_an_absent_gpu():
    results = compile_kernels(["step_scales", "gradient_gains"], ["sm_90"], 32, number=2)
    assert [result.kernel for result in results] == ["step_scales", "gradient_gains"]
    for result in results:
        assert result.passed, result.error
        assert result.variants >= 2
        assert 16 <= result.registers <= 128
        assert result.spill_bytes == 0
    assert results[1].shared_bytes > 0


@pytest.mark.slow
def test_launchers_choose_as_on_the_gpu_that_is_compiled_for():
    hopper, other = compile_kernels(["gram"], ["sm_90", "sm_120"], 32, number=2)
    assert hopper.passed, hopper.error
    assert other.passed, other.error
    assert other.shared_bytes < 99 << 10 < hopper.shared_bytes


def variants_of(name: str) -> list[tuple[dict, dict]]:
    (spec,) = find_kernels([name])
    with compile_for(TARGETS["sm_90"].capability, TARGETS["sm_90"].processors):
        variants = compile_ahead._variants(spec, 32)
    return [(variant.signature, variant.constants) for variant in variants]


@pytest.mark.slow
def test_compiled_variants_are_those_that_a_gpu_launches(compiling):
    """In bf16, of a single head, and of the widest matrix of a preset."""
    variants = compiling(variants_of, "decode_attention_8bit")
    assert any(
        constants.get("HEADS") == 1 and signature["qkv_ptr"] == "*bf16"
        for signature, constants in variants
    )
    shares = {constants["WARPS"] for _, constants in compiling(variants_of, "row_matmul")}
    assert shares == {4, 8, 16}
    variants = compiling(variants_of, "compressed_attention_backward")
    wide = {signature["q_ptr"] for signature, constants in variants if constants.get("HALF") == 256}
    assert wide == {"*fp32", "*bf16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["row_matmul", "decode_attention_8bit", "compressed_attention_backward"]
)
def test_kernels_that_once_did_not_compile_on_an_h200_do(name):
    (result,) = compile_kernels([name], ["sm_90"], 32, number=2)
    assert result.passed, result.error


@needs_triton
def test_a_variant_is_as_triton_specialises_it():
    names = ("x_ptr", "part_ptr", "rows", "heads", "width", "plain", "SIZE")
    params = [SimpleNamespace(name=name, do_not_specialize=name == "plain") for name in names]
    function = SimpleNamespace(arg_names=names, params=params)
    x = torch.empty(64, device="meta")
    given = {"x_ptr": x, "part_ptr": x[2:], "rows": 48, "heads": 1, "width": 7, "plain": 32}
    launch = Launch(function, (1,), given, {"SIZE": 8}, {"num_warps": 4})
    _, signature, constants, attributes, options, _ = variant_of(launch)
    assert constants == {"SIZE": 8, "heads": 1}
    assert signature == {
        "x_ptr": "*fp32", "part_ptr": "*fp32", "rows": "i32", "heads": "constexpr",
        "width": "i32", "plain": "i32", "SIZE": "constexpr",
    }  # fmt: skip
    assert attributes == {path: [["tt.divisibility", 16]] for path in ((0,), (2,))}
    assert options == {"num_warps": 4}


def test_every_kernel_whose_tensors_need_memory_is_known():
    assert {spec.name for spec in find_kernels([])} > compile_ahead.VALUE_DEPENDENT


def test_spills_and_shared_memory_have_limits():
    target = TARGETS["sm_120"]
    assert find_excess(16, 99 << 10, target) is None
    assert "20 bytes of registers" in find_excess(20, 0, target)
    assert "do not fit in 101376" in find_excess(0, (99 << 10) + 1, target)


@needs_triton
def test_targets_are_found_by_name():
    assert find_targets("all") == list(TARGETS)
    assert find_targets("sm_80, gfx942") == ["sm_80", "gfx942"]
    with pytest.raises(ArbError, match="no target is named `sm_70`"):
        find_targets("sm_70")
