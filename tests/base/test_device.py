"""The dtype of activations is one that the CPU multiplies by itself."""

import gc
from contextlib import nullcontext
from pathlib import Path
from weakref import ref

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime import device as devices
from arbcli.kernels.runtime.device import (
    available_bytes,
    capturing,
    default_compute,
    deterministic,
    explained_out_of_memory,
    multiplies_bf16,
)

X86 = {"architecture": "x86_64", "avx2": True, "avx512_f": False, "avx512_bf16": False,
       "avx512_fp16": False, "amx_tile": False, "amx_int8": False, "amx_bf16": False}  # fmt: skip
ARM = {"architecture": "arm64", "neon": True, "fp16_arith": True, "bf16": False, "sve": False}
CPUS = {
    "AVX2": (X86, "fp32"),
    "AVX-512 of 2017, where oneDNN emulates": (X86 | {"avx512_f": True}, "fp32"),
    "AVX-512 BF16": (X86 | {"avx512_f": True, "avx512_bf16": True}, "bf16"),
    "AMX": (X86 | {"amx_tile": True, "amx_bf16": True}, "bf16"),
    "Arm": (ARM, "fp32"),
    "Arm with fp16 and SVE": (ARM | {"sve": True, "sve_bf16": False, "sve_max_length": 32}, "fp32"),
    "Arm of v8.6": (ARM | {"bf16": True}, "bf16"),
    "unknown": ({"architecture": "riscv64"}, "fp32"),
}


@pytest.mark.parametrize("name", CPUS)
def test_compute_is_the_native_dtype_of_the_cpu(name, monkeypatch):
    capabilities, compute = CPUS[name]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert default_compute(torch.device("cpu")) == compute
    assert multiplies_bf16(capabilities) == (compute == "bf16")


WANTS = {
    "GPU": (torch.OutOfMemoryError("CUDA out of memory"), "the GPU's memory is not enough"),
    "Python": (MemoryError(), "this machine's memory is not enough"),
    "torch": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        "this machine's memory is not enough",
    ),
}


@pytest.mark.parametrize("name", WANTS)
def test_lack_of_memory_is_an_error_with_a_hint(name):
    error, message = WANTS[name]
    with pytest.raises(ArbError, match=message) as caught, explained_out_of_memory("do so"):
        raise error
    assert caught.value.hint == "do so"
    with pytest.raises(ArbError) as caught, explained_out_of_memory():
        raise error
    assert "`--batch`, `--ctx` or `--preset`" in caught.value.hint
    with pytest.raises(RuntimeError, match="another"), explained_out_of_memory():
        raise RuntimeError("another fault")


def attention_of_cuda() -> list[bool]:
    """Tell which kernels may run whose backward adds in any order."""
    cuda = torch.backends.cuda
    return [cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_determinism_is_an_error_where_it_cannot_be_and_ends(before):
    torch.set_deterministic_debug_mode(before)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert attention_of_cuda() == [False, False]
    assert attention_of_cuda() == [True, True]
    assert torch.get_deterministic_debug_mode() == before
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("4096", "1024", 3072),  # a container that may take less than the machine has
        ("max", "1024", 7 * 1024),  # one without a limit
        ("1048576", "0", 7 * 1024),
        ("1024", "4096", 0),
    ],
)
def test_memory_that_is_free_is_the_least_of_the_machine_and_its_container(
    limit, used, expected, tmp_path, monkeypatch
):
    files = {"meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n", "limit": limit, "used": used}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    groups = [(tmp_path / "limit", tmp_path / "used"), (tmp_path / "none", tmp_path / "none")]
    monkeypatch.setattr(devices, "CONTAINER_MEMORY", groups)
    memory = tmp_path / "meminfo"
    monkeypatch.setattr(devices, "Path", lambda p: memory if str(p) == "/proc/meminfo" else Path(p))
    assert available_bytes() == expected
    memory.unlink()
    if limit == "max":  # nothing but the machine itself tells
        sizes = {"SC_PHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr("os.sysconf", sizes.__getitem__)
        assert available_bytes() == 5 * 4096
    else:
        assert available_bytes() == max(0, int(limit) - int(used))


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_a_graph_is_captured(collects, monkeypatch):
    """One of it may be another graph, which must not be freed then."""
    monkeypatch.setattr("torch.cuda.graph", lambda _, **how: nullcontext(how))
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(1, 1, 1)
        if not collects:
            gc.disable()
        with capturing(None, pool=3):
            garbage = ref(Cycle())
            _ = [[] for _ in range(1000)]
            assert garbage() is not None
        assert gc.isenabled() == collects
        _ = [[] for _ in range(1000)]
        assert (garbage() is None) == collects
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
