"""The `native` backend: how its loops are compiled, and that they give the same bits everywhere.

What they compute is compared with the references in `test_every_kernel.py`.
"""

import os
import platform
import sys
from hashlib import sha256
from pathlib import Path
from subprocess import check_output, run

import pytest
import torch
from checked import assert_as_wanted

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime import native, native_library
from arbcli.kernels.runtime.backend import backend_of, check_backend, default_backend, use_backend
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import copies
from arbcli.verify.compare import as_tuple, poisoned
from arbcli.verify.registry import BY_NAME, KERNELS

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    """Forget what was loaded, and have an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    yield tmp_path / "arb"
    native._library.cache_clear()


@pytest.fixture
def one_loop(afresh, monkeypatch, tmp_path):
    """Have a source that is compiled at once, where it does not matter what the loops are."""
    source = tmp_path / "native.c"
    source.write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(native_library, "SOURCE", source)


@compiled
def test_native_backend_is_the_default_on_a_cpu():
    assert default_backend(CPU) == "native"
    assert backend_of(torch.empty(0)) == "native"
    with use_backend("torch"):
        assert backend_of(torch.empty(0)) != "native"


@pytest.mark.parametrize(("compiler", "reason"), [
    ("no-such-compiler", "no C compiler was found"), ("'", "`CC` cannot be read: No closing quot"),
    ("false", "`false` failed: nothing was said"),
    ("sh -c 'printf \"In f\\n\\377 error\\n\" >&2; exit 1'", "`sh` failed: \ufffd error"),
])  # fmt: skip
def test_without_a_compiler_torch_runs_and_the_reason_is_reported(
    compiler, reason, afresh, monkeypatch
):
    monkeypatch.setenv("CC", compiler)
    assert default_backend(CPU) == "torch"
    with pytest.raises(ArbError, match=f"cannot run here: {reason}"):
        check_backend("native", CPU)


def test_native_backend_is_refused_on_a_gpu():
    with pytest.raises(ArbError, match="needs a CPU"):
        check_backend("native", torch.device("cuda"))


@compiled
@pytest.mark.usefixtures("one_loop")
def test_compiled_library_is_cached_and_compiled_again_if_damaged(afresh, monkeypatch):
    """A library that is cut off would end the process by SIGBUS, were it loaded."""
    assert native.available()
    (kept,) = afresh.glob("*.so")
    size = kept.stat().st_size
    os.truncate(kept, size // 2)
    native._library.cache_clear()
    assert native.available()
    assert kept.stat().st_size == size
    native._library.cache_clear()
    monkeypatch.setattr(native_library, "_compile", lambda _: pytest.fail("it is there"))
    assert native.available()


@compiled
@pytest.mark.usefixtures("one_loop")
def test_library_that_another_user_can_write_is_not_loaded(afresh, tmp_path, monkeypatch):
    assert native.available()
    (kept,) = afresh.glob("*.so")
    compiled = kept.read_bytes()
    planted, source = tmp_path / "planted", tmp_path / "planted.c"
    source.write_text(
        "#include <fcntl.h>\n__attribute__((constructor)) static void run(void)"
        f' {{ open("{planted}", O_CREAT, 0600); }}\n'
    )
    command = [*native_library._compiler(), "-shared", "-fPIC", str(source), "-o", str(kept)]
    native_library._compile(command)
    digest = sha256(kept.read_bytes()).hexdigest()
    kept.with_name(f"{kept.name}.sha256").write_text(digest)
    kept.chmod(0o666)
    native._library.cache_clear()
    assert native.available()
    assert not planted.exists()
    assert kept.read_bytes() == compiled
    assert kept.stat().st_mode & 0o777 == 0o600


@compiled
def test_a_cache_that_cannot_be_written_does_no_harm(one_loop, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert native.available()


@compiled
@pytest.mark.parametrize("spec", [s for s in KERNELS if s.native], ids=lambda spec: spec.name)
def test_bits_do_not_depend_on_the_number_of_threads(spec, monkeypatch):
    monkeypatch.setattr(native, "MIN_ELEMENTS", 0)
    inputs = spec.drawn(CaseGenerator(1, CPU, torch.float32), 32, 67, 131, 161)
    outputs = []
    for threads in (1, 3, 99):  # the last are more than there is room for
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with use_backend("native"):
            outputs.append(as_tuple(spec.native(*copies(inputs))))
    for one, *others in zip(*outputs, strict=True):
        assert all(torch.equal(one, other) for other in others)


@compiled
@pytest.mark.parametrize("name", ["prepacked_rows", "int8_matmul"])
def test_every_thread_has_room_of_its_own_for_a_row(name, monkeypatch):
    """All have rounded the same one there, and none a number of another's."""
    monkeypatch.setattr(native, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    given, call = [], native.call
    monkeypatch.setattr(native, "call", lambda *args: [given.append(args), call(*args)][1])
    inputs = BY_NAME[name].drawn(CaseGenerator(1, CPU, torch.float32), 32, 1, 131, 161)
    assert len(inputs[0]) == 1
    with use_backend("native"), poisoned():
        BY_NAME[name].native(*copies(inputs))
    (space,) = (args[10] for args in given if args[0] == "multiply_rows")
    one, *others = space.view(3, -1)
    assert all(torch.equal(one, other) for other in others)


@compiled
@pytest.mark.parametrize(("level", "flags", "command", "per_cpu"), [
    ("", "fma", ["-march=native"], True), ("x86-64", "fma", ["-march=x86-64"], False),
    ("x86-64-v3", "avx2 bmi2 f16c fma movbe", ["-march=x86-64-v3"], False),
])  # fmt: skip
def test_loops_are_compiled_for_the_requested_level(
    level, flags, command, per_cpu, afresh, monkeypatch
):
    """A level's library serves every CPU that shares the cache; one of this CPU does not."""
    commands = []

    def refused(given):
        commands.append(given)
        raise native_library.MissingLibrary("that is enough")

    monkeypatch.setattr(native_library, "_compile", refused)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(native_library.LEVEL, level)
    for model in "one", "other":
        monkeypatch.setattr(
            native_library, "describe_cpu", lambda model=model: [model, f"flags : {flags}"]
        )
        native._library.cache_clear()
        assert native.why_not() == "that is enough"
    first, second = commands
    assert [word for word in first if word.startswith("-m")] == command
    names = {Path(given[given.index("-o") + 1]).name for given in (first, second)}
    assert len(names) == 1 + per_cpu


@pytest.mark.parametrize("level", ["x86-64-v3", "armv8-a", "none such"])
def test_level_that_this_cpu_does_not_have_is_refused(level, afresh, monkeypatch):
    monkeypatch.setenv(native_library.LEVEL, level)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        native_library, "describe_cpu", lambda: ["flags : avx2 cx16 popcnt sse4_2 ssse3"]
    )
    with pytest.raises(ArbError, match=f"is `{level}`, and the levels of this CPU") as refused:
        default_backend(CPU)
    assert str(refused.value).endswith(": `x86-64`, `x86-64-v2`")


@compiled
@pytest.mark.parametrize(
    "name", ["rms_norm", "rms_norm_backward", "gated_rms_norm", "gated_rms_norm_backward"]
)
def test_norm_with_eps_of_zero_still_normalises(name):
    """No eps is what says that there is no norm."""
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    inputs = BY_NAME[name].drawn(CaseGenerator(2, CPU, torch.float32), 32, 5, 7, 37)
    inputs = tuple(0.0 if isinstance(part, float) else part for part in inputs)
    assert 0.0 in [part for part in inputs if isinstance(part, float)]
    wanted = spec.reference(*copies(inputs))
    assert_as_wanted(spec, name, spec.native(*copies(inputs)), wanted)


@compiled
def test_loop_skips_tensors_on_meta():
    assert native.call("no_such_loop", torch.empty(2, device="meta")) == 0


WATCHED = """
import sys
import pytest
from arbcli.kernels.runtime import native, native_library
native_library.FLAGS += ("-fsanitize=address",)
tests = ["-m", "not slow", "-p", "no:cacheprovider", "-q", "-s", "-x", sys.argv[1]]
sys.exit(pytest.main([*tests, "-k", "native or loop_in_c"]))
"""


@pytest.mark.slow
@compiled
def test_loops_stay_within_their_memory(tmp_path):
    """They are compiled to watch every access: one past an array may change no result."""
    sanitizer = check_output(
        [*native_library._compiler(), "-print-file-name=libasan.so"], text=True
    ).strip()
    if not Path(sanitizer).is_absolute():
        pytest.skip("the C compiler has no library that watches accesses")
    cases = Path(__file__).parents[1] / "test_every_kernel.py"
    watched = {"LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0"}
    watched["XDG_CACHE_HOME"] = str(tmp_path)  # what is compiled so needs that library
    command = [sys.executable, "-c", WATCHED, str(cases)]
    done = run(command, env=os.environ | watched, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
