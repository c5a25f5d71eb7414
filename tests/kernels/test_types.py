"""Types of all kernels: of results, which are the same on every backend, and of sums.

Triton's interpreter computes wrongly in bfloat16, so no case of a CPU reads it. It computes as a
GPU does in float16, which kernels read alike.
"""

import inspect
from collections.abc import Iterator

import pytest
import torch
from marks import needs_triton

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.launches import replaced_launches
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import copies
from arbcli.verify.compare import as_tuple
from arbcli.verify.registry import KERNELS

CPU, HALF = torch.device("cpu"), torch.float16
SIZES = 32, 8, 33, 165


def forms(results) -> list:
    return [None if x is None else (x.dtype, x.shape) for x in as_tuple(results)]


UNFUSED = {
    "_blend_moment_kernel", "_quantise_gradient_kernel", "_step_scales_kernel",
    "_step_trits_kernel",
}  # fmt: skip
"""Kernels of exact integers that add to products of real numbers, where a compiler may else round
once instead of twice. Interpreted ones always round twice."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_same_types_and_shapes_on_every_backend(dtype):
    unfused = set()

    def launch(kernel, _grid, *_, **options):
        if not options.get("enable_fp_fusion", True):
            unfused.add(kernel.fn.__name__)

    for spec in KERNELS:
        inputs = spec.drawn(CaseGenerator(0, CPU, dtype), *SIZES)
        with use_backend("torch"):
            wanted = forms(spec.torch(*copies(inputs)))
        with use_backend("interpreter"), replaced_launches(launch):
            assert forms(spec.triton(*copies(inputs))) == wanted, spec.name
        if spec.native and native.available():
            with use_backend("native"):
                assert forms(spec.native(*copies(inputs))) == wanted, spec.name
        asked = {x for x in inputs if isinstance(x, torch.dtype)}
        assert asked <= {kind for kind, _ in filter(None, wanted)}, spec.name
    assert unfused >= UNFUSED


COPIES = {"decode_digits", "decode_weight", "embedding_rows", "sum_gradients", "unpack_trits"}
"""Operations that take a dtype and store in it what they read."""


def test_results_in_float32_of_bfloat16_have_more_than_its_bits():
    """Else what is asked for in float32 would be rounded on its way."""
    asked = {
        spec for spec in KERNELS
        if "dtype" in inspect.signature(spec.torch).parameters and spec.name not in COPIES
    }  # fmt: skip
    for spec in asked:
        inputs = spec.drawn(CaseGenerator(0, CPU, torch.bfloat16), *SIZES)
        wide = [torch.float32 if isinstance(x, torch.dtype) else x for x in copies(inputs)]
        more = {} if torch.float32 in wide else {"dtype": torch.float32}
        with use_backend("torch"):
            for result in as_tuple(spec.torch(*wide, **more)):
                assert (result.bfloat16() != result).any(), spec.name
    assert len(asked) > 8


NOT_IN_HALVES = {
    "attend_ahead", "attend_parts", "digits_matmul", "prepacked_rows", "row_by_row",
    "row_matmul", "rms_norm_e4m3", "add_rms_norm_e4m3", "gated_rms_norm_e4m3", "choose_entries",
    "append_position_8bit",
}  # fmt: skip
"""Kernels that take bits of bfloat16 apart, or round to it, or to eight bits."""
ROUNDED = {
    "add_gained_rms_norm": 4e-4, "add_rms_norm": 4e-4, "append_position": 5e-4,
    "causal_attention_backward": 4e-4, "compress_blocks": 4e-4, "compress_blocks_backward": 3e-4,
    "compressed_attention": 4e-4, "compressed_attention_backward": 6e-4, "decode_attention": 4e-4,
    "decode_attention_8bit": 6e-4, "decode_compressed": 4e-4, "decode_latent": 3e-4,
    "gained_rms_norm_backward": 4e-4, "rms_norm_backward": 4e-4, "decay_scan": 3e-4,
    "rotary_attention_backward": 4e-4, "unit_moment": 6e-4,
}  # fmt: skip
"""Kernels that round between their sums, and the norm of the error of that over that of the result.

One rounding to float16 is 2.8e-4 at most, and most results have about 2e-4."""


def in_type(value, dtype):
    if value is torch.bfloat16:
        return dtype
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, HALF)
    return value.to(dtype) if low else value


def halves(spec) -> list:
    """Draw inputs that float16 holds."""
    for seed in range(20):
        inputs = spec.drawn(CaseGenerator(seed, CPU, torch.bfloat16), *SIZES)
        found = [in_type(x, HALF) for x in inputs]
        if all(x.isfinite().all() for x in found if getattr(x, "dtype", None) is HALF):
            return found
    raise LookupError(spec.name)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Let operations that launchers call take float16, too."""
    checks = [(spec, spec.operation.check) for spec in KERNELS]
    for spec in KERNELS:
        object.__setattr__(spec.operation, "check", lambda *_: None)
    yield
    for spec, check in checks:
        object.__setattr__(spec.operation, "check", check)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bfloat16")
@pytest.mark.parametrize(
    "spec",
    [spec for spec in KERNELS if spec.bfloat16 and spec.name not in NOT_IN_HALVES],
    ids=lambda spec: spec.name,
)
def test_numbers_are_widened_before_they_are_computed_with(spec, unchecked):
    """Of inputs of 16 bits a kernel makes what it does of 32, rounded where it is stored."""
    inputs = halves(spec)
    with use_backend("interpreter"):
        low = as_tuple(spec.triton(*copies(inputs)))
        high = as_tuple(spec.triton(*copies([in_type(x, torch.float32) for x in inputs])))
    compared = 0
    for got, wanted in zip(low, high, strict=True):
        if got is not None and got.numel():
            compared += 1
            wanted = wanted.to(got.dtype)
            if spec.name in ROUNDED and got.is_floating_point():
                error = (got.double() - wanted.double()).norm() / wanted.double().norm()
                assert error <= ROUNDED[spec.name]
            else:
                assert torch.equal(got, wanted)
    assert compared
