"""Kernels are compiled once and counted; launches are merged, recorded, and overlap."""

import fcntl
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from marks import needs_triton

from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.kernels.attention.decode_attention import count_on_
from arbcli.kernels.matmul.int8_matmul import prepack_int8
from arbcli.kernels.matmul.prepacked import prepack
from arbcli.kernels.matmul.prepacked_rows import prepacked_rows
from arbcli.kernels.runtime import compile_once, native
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.kernels.runtime.compiling import counted_compiling
from arbcli.kernels.runtime.merged import (
    Launch,
    Tables,
    _described,
    _groups,
    _tabulated,
    merge_launches,
)
from arbcli.kernels.runtime.overlap import overlap_options, overlapping
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.blend_moment import blend_moment_verification
from arbcli.verify.kernels.update.step_scales import step_scales_verification

compiler = pytest.importorskip("triton").compiler


def test_compiler_is_called_while_a_lock_is_held(monkeypatch, tmp_path):
    held = []

    def compile_alone(source, target=None, options=None):
        (path,) = tmp_path.iterdir()
        with path.open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append((source, target, options))
        return "compiled"

    monkeypatch.setattr(compile_once, "INTERPRETED", False)
    monkeypatch.setattr(compiler, "compile", compile_alone)
    compile_once.compile_each_once(str(tmp_path))
    source = SimpleNamespace(hash=lambda: "abc")
    assert compiler.compile(source, target="sm_90", options={"num_warps": 4}) == "compiled"
    assert held == [(source, "sm_90", {"num_warps": 4})]
    with next(tmp_path.iterdir()).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was let go


triton = pytest.importorskip("triton")


def compile_one(microseconds: int, *, cache_hit: bool) -> None:
    """Tell listeners, as Triton does once it has a kernel."""
    times = SimpleNamespace(total=microseconds)
    rest = {"src": None, "metadata": {}, "metadata_group": {}}
    triton.knobs.compilation.listener(times=times, cache_hit=cache_hit, **rest)


def test_compiled_and_loaded_kernels_are_counted_apart(monkeypatch):
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: heard.append(about))
    with counted_compiling() as outer:
        compile_one(1_500_000, cache_hit=False)
        with counted_compiling() as inner:
            compile_one(250_000, cache_hit=True)
        compile_one(500_000, cache_hit=False)
    compile_one(1, cache_hit=False)
    assert (outer.compiled, outer.loaded, outer.seconds) == (2, 1, 2.25)
    assert (inner.compiled, inner.loaded, inner.seconds) == (0, 1, 0.25)
    assert [about["cache_hit"] for about in heard] == [False, True, False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a GPU that is not there")
def test_launches_overlap_only_if_requested_and_on_a_gpu_that_can(monkeypatch):
    monkeypatch.setattr("arbcli.kernels.runtime.overlap.INTERPRETED", False)
    x = torch.zeros(1)
    for context, capability, expected in (
        (overlapping, (9, 0), True), (overlapping, (8, 9), False), (nullcontext, (9, 0), False)
    ):  # fmt: skip
        with compile_for(capability), context():
            options = overlap_options(x)
        assert options["OVERLAP"] == options.get("launch_pdl", False) == expected


def test_weights_are_written_before_they_may_be_read_without_a_wait(monkeypatch):
    rng, waits = CaseGenerator(0, torch.device("cpu"), torch.float32), []
    packed = rng.packed(16, 64, 32, digits="trit")
    digits = packed._replace(remainder=torch.zeros(16, 64, dtype=torch.int8), radix=64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    with use_backend("torch"):
        prepack(packed)
        prepack_int8(digits)
    assert len(waits) == 2


def copies(spec, device):
    for _ in range(2):
        cases = [case.inputs for case in [*spec.cases(device, 32)][::2]]
        yield [[x.clone() if torch.is_tensor(x) else x for x in inputs] for inputs in cases]


def test_equal_kernels_are_launched_once(device):
    launched = []
    (inputs, *_), _ = copies(step_scales_verification, device)
    with replaced_launches(lambda kernel, grid, *_, **__: launched.append(grid)):
        parts = [lambda: step_scales_verification.triton(*inputs)] * 7
        merge_launches(parts, device)
    assert [grid[1:] for grid in launched] == [(7,)]


def test_launches_of_two_kinds_run_as_one_with_the_same_bits(device):
    apart, together = copies(blend_moment_verification, device)
    launched = []
    parts = [partial(blend_moment_verification.triton, *inputs) for inputs in together]
    with use_backend("triton" if device.type == "cuda" else "interpreter"):
        for inputs in apart:
            blend_moment_verification.triton(*inputs)
        merge_launches(parts, device)
        with replaced_launches(lambda kernel, *_, **__: launched.append(kernel.__name__)):
            merge_launches(parts, device)
    assert "_paired_kernel" in launched
    assert len(launched) < len({launch_of(part).kind for part in parts})
    for one, other in zip(apart, together, strict=True):
        for x, y in zip(one, other, strict=True):
            assert not torch.is_tensor(x) or torch.equal(x, y)


def launch_of(part) -> Launch:
    """Describe the only launch of a function."""
    launches = []
    with replaced_launches(lambda *args, **options: launches.append((args, options))):
        part()
    ((kernel, grid, *args), options) = launches[0]
    return _described(kernel, grid, tuple(args), options)


def launch(kernel: str, pairs: bool = True, warps: int = 2) -> Launch:
    return Launch(kernel, 1, (), (), (("num_warps", warps),), pairs)


def kernels(recorded) -> list[list[str]]:
    return [["".join(x.kernel for x in wave) for wave in group] for group in _groups(recorded)]


def test_kinds_are_paired_if_their_options_are_equal_and_their_ptx_declares_nothing():
    first, second, third = (launch(name) for name in "abc")
    assert kernels([[first], [second], [first], [third]]) == [["aa", "b"], ["c"]]
    assert kernels([[first], [launch("b", warps=4)]]) == [["a"], ["b"]]
    apart = [[launch("a", pairs=False)], [launch("b", pairs=False)]]
    assert kernels([*apart, [third]]) == [["a"], ["b"], ["c"]]
    assert kernels([[first, second], [third]]) == [["a", "c"], ["b"]]


def test_tables_of_captured_launches_have_a_room_of_their_own(device):
    tables = Tables()
    assert tables.bring([1, 2], device).tolist() == [1, 2]
    with tables.captured(5, device) as room:
        first, second = tables.bring([3, 4], device), tables.bring([5, 6, 7], device)
        assert not room.any()
        with pytest.raises(RuntimeError, match="more launches"):
            tables.bring([8], device)
        tables._numbers.pop()
    assert (first.tolist(), second.tolist()) == ([3, 4], [5, 6, 7])
    assert tables.brought == 8
    assert tables.bring([9], device).data_ptr() != room.data_ptr()
    with tables.captured(2, device) as again:  # of a step that is captured anew
        third = tables.bring([10, 11], device)
    assert (first.tolist(), third.tolist(), again.tolist()) == ([3, 4], [10, 11], [10, 11])


@needs_triton
@pytest.mark.parametrize("others", [(), (16,), (24,), (16, 24)])
def test_hints_about_an_argument_hold_for_all_launches(others, device):
    """A compiler loads words at once where 16 divides an address, or a stride."""
    buffer = torch.zeros(99, dtype=torch.uint8, device=device)
    numbers = (32, *others, 64)
    wave = [Launch(None, 1, (buffer[n:], n, 0.5), (), ()) for n in numbers]
    how = [kind for kind, *_ in _tabulated(wave).plan]
    wanted = ["pointer", "integer"] if 24 in others else ["aligned", "multiple"]
    assert how == [*wanted, "shared"]


pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture(autouse=True)
def use_loops():
    with use_backend("native"), torch.no_grad():
        yield


def model(**options) -> LanguageModel:
    shape = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8}
    return build_model(preset("tiny", **shape | options), torch.float32)


@pytest.mark.parametrize("threads", [1, 3])
def test_replay_reads_the_current_values_of_tensors(threads, monkeypatch):
    monkeypatch.setattr(native, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rng = CaseGenerator(0, torch.device("cpu"), torch.float32)
    first, second = (prepack(rng.packed(*s, 32, 4, "trit")) for s in ((96, 40), (56, 96)))
    x, position = torch.randn(1, 40), torch.zeros((), dtype=torch.int32)
    step = native.Recording()
    with step:
        y = prepacked_rows(prepacked_rows(x, first, 1e-6), second, 1e-6)
        count_on_(position, 1)
    for seed in range(5):
        x.normal_(generator=rng.generator.manual_seed(seed))
        step.replay()
        assert torch.equal(y, prepacked_rows(prepacked_rows(x, first, 1e-6), second, 1e-6))
        assert position == seed + 2


def test_calls_that_are_not_loops_are_not_recorded():
    x = torch.ones(4)
    with pytest.raises(native.NotRecorded, match="mul"), native.Recording():
        x.view(2, 2).mul(2)
    with pytest.raises(native.NotRecorded, match="rotary_norm"), native.Recording():
        native.call("rotary_norm", x)
    assert torch.equal(x * 2, torch.full((4,), 2.0))  # outside nothing is refused


@pytest.mark.parametrize("options", [{}, {"digits": "all"}, {"sub_norms": False}], ids=str)
def test_recorded_step_gives_the_bytes_of_an_unrecorded_step(options):
    lm, texts = model(**options), []
    with lm.prepared_weights():
        for capture in (None, False):
            decoder = Decoder(lm, 60, capture=capture)
            decoder.begin(b"recorded, in pieces", Sampling(seed=3))
            assert decoder.recorded == (capture is None)
            texts.append(b"".join(decoder.stream(20)) + b"".join(decoder.stream(9)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["arb-tiny", "hnet-tiny"])
def test_a_model_that_needs_more_than_loops_is_not_recorded(name):
    lm = build_model(preset(name, ctx=16), torch.float32)
    with lm.prepared_weights():
        decoder = Decoder(lm, 8)
        decoder.begin(b"a")
    assert not decoder.recorded
