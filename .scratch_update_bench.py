"""Verify and time the update's kernels on a GPU: `python .scratch_update_bench.py [sweep]`, from the root."""

import itertools
import sys
import time
from functools import partial
from statistics import median

import torch

from arbcli.kernels import blend_moment as bm
from arbcli.kernels import gradient_gains as gg
from arbcli.kernels import gradient_statistics as gs
from arbcli.kernels import step_scales as ss
from arbcli.kernels import step_trits as st
from arbcli.kernels import unit_gain as ug
from arbcli.kernels.decode_weight import random_packed
from arbcli.kernels.timing import Stopwatch, measure_roofline, time_calls
from arbcli.kernels.verify import Checks, verify_kernels
from arbcli.model.config import preset
from arbcli.model.ternary import TernaryTensor
from arbcli.model.update import Updater, orthogonalise

DEVICE = torch.device("cuda")
STARTED = time.perf_counter()
NAMES = (
    "gradient_statistics", "gradient_gains", "unit_gain", "step_scales", "blend_moment",
    "step_by_moment", "step_by_direction",
)


def say(*words):
    print(f"[{time.perf_counter() - STARTED:5.1f}s]", *words, flush=True)


def verify():
    for groups, fuzz in (({"T32": 32, "T6": 6}, 0), ({"T6": 6}, 8)):
        checks = Checks(real_shapes=((1152, 384), (256, 5632)), fuzz=fuzz)
        report = verify_kernels(NAMES, groups, DEVICE, ["triton"], checks)
        say("verified" if report.passed else "FAILED", "fuzz" if fuzz else "cases and real shapes")
        for result in report.kernels:
            for failure in result.failures:
                print("   ", result.kernel, result.scale_type, failure)


def microseconds(watch, call, seconds=0.12):
    return median(time_calls([call], watch, seconds)[0])


def scalar(value, dtype=torch.int32):
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def calls(n, k):
    """Name, launcher and bytes moved of every kernel on an (n, k) matrix with T32."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    packed, exponent, fraction = random_packed(n, k, 32, generator, spread=8)
    grad = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    draw = partial(torch.randint, generator=generator, device=DEVICE, dtype=torch.int8)
    remainder, moment, nibble = draw(-15, 16, (n, k)), draw(-40, 41, (n, k)), draw(-119, 119, (n, k))
    rows, columns = torch.full((n,), 2.0**8, device=DEVICE), torch.full((k,), 2.0**8, device=DEVICE)
    key, ok, limit, gain, shift = (scalar(x) for x in (-5, 1, 2**19, 3000, 10))
    squares, flips, zero, flag = (scalar(x, torch.int64) for x in (500 * n * k, 0, 0, 0))
    size, unit = scalar(2**33, torch.int64), torch.tensor(2.0**16, device=DEVICE)
    w, p, s = n * k, packed.numel(), exponent.numel()
    found = gs.gradient_statistics(grad, packed, exponent, fraction, 32, factored=True)
    running = [torch.zeros(x, 2, dtype=torch.int8, device=DEVICE) for x in (n, k)]
    parts = sum(x.nbytes for x in found[1:])
    state = (grad, packed, exponent, fraction, 32)
    blend = (key, ok, squares, 58982, 813, 7)
    step = (key, size, squares, limit, ok, flips)
    along = (key, gain, shift, limit, ok, flips, 32, 127)
    yield "gradient_statistics factored", partial(gs._gradient_statistics_triton, *state, True, False), 2 * w + p + 6 * s + parts
    yield "gradient_statistics", partial(gs._gradient_statistics_triton, *state, False, False), 2 * w + p + 6 * s
    yield "gradient_gains factored", partial(gg._gradient_gains_triton, *found, *running, key, key, zero, flag), parts
    yield "unit_gain factored", partial(ug._unit_gain_triton, grad, rows, columns, ok), 2 * w
    yield "unit_gain", partial(ug._unit_gain_triton, grad, None, None, ok), 2 * w
    yield "step_scales", partial(ss._step_scales_triton, exponent, fraction, found.slope, unit, key, gain, shift, ok), 8 * s
    yield "blend_moment factored", partial(bm._blend_moment_triton, moment, grad, rows, columns, *blend, False), 4 * w
    yield "blend_moment rows", partial(bm._blend_moment_triton, moment, grad, rows, None, *blend, False), 4 * w
    yield "blend_moment transposed", partial(bm._blend_moment_triton, moment, grad.view(k, n).T, rows, None, *blend, False), 4 * w
    yield "blend_moment nibble", partial(bm._blend_moment_triton, nibble, grad, rows, columns, *blend, True), 4 * w
    yield "step_by_moment", partial(st._step_by_moment_triton, packed, remainder, moment, *step, 32, 127), 3 * w + 2 * p
    yield "step_by_moment nibble", partial(st._step_by_moment_triton, packed, nibble, None, *step, 8, 7), 2 * w + 2 * p
    yield "step_by_direction", partial(st._step_by_direction_triton, packed, remainder, grad, rows, columns, *along), 4 * w + 2 * p


def tables(watch):
    roofline = measure_roofline(watch)
    say(f"copy {roofline.bytes_per_second / 1e9:.0f} GB/s, launch {roofline.launch_us:.1f} us")
    shapes = ((8192, 8192), (11264, 2048), (1152, 384))
    found = [[(name, microseconds(watch, call), size) for name, call, size in calls(*shape)] for shape in shapes]
    print(f"{'us (GB/s)':32s}" + "".join(f"{n}x{k}".rjust(20) for n, k in shapes))
    for rows in zip(*found, strict=True):
        print(f"{rows[0][0]:32s}" + "".join(f"{us:12.1f} ({size / us / 1e3:5.0f})" for _, us, size in rows))


def whole(watch):
    for n, k in ((8192, 8192), (11264, 2048), (1152, 384)):
        tokens = 8192
        x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
        y = torch.randn(tokens, n, device=DEVICE, dtype=torch.bfloat16)
        peer = microseconds(watch, lambda: torch.mm(y.T, x), 0.3)
        grad = torch.mm(y.T, x)
        del x, y
        print(f"{n}x{k}: cuBLAS grad_w, {tokens} tokens, {peer:.1f} us")
        for rule, direction in (
            ("moment", "factored"), ("nibble", "factored"), ("carry", "factored"),
            ("moment", "sign"), ("moment", "orthogonal"),
        ):
            config = preset("tiny", rule=rule, direction=direction)
            with torch.device(DEVICE):
                tensor = TernaryTensor(n, k, config)
            tensor.initialise(0.02, 0, 0)
            updater = Updater([tensor], config, 3, torch.bfloat16)
            updater.begin(0, 1.0)
            us = microseconds(watch, lambda: updater(tensor, grad), 0.2)
            line = f"  {rule:7s} {direction:11s} {us:9.1f} us, of grad_w + update: {peer / (peer + us):5.2f} x cuBLAS"
            if direction == "orthogonal":
                line += f", orthogonalise alone {microseconds(watch, lambda: orthogonalise(grad, torch.bfloat16), 0.1):.1f} us"
            print(line)
            if n == 8192 and rule != "nibble":
                launches(partial(updater, tensor, grad))
        torch.cuda.empty_cache()


def launches(call):
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = sorted((e for e in found.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    print("    " + ", ".join(f"{e.name.split('(')[0][:28]} {e.device_time:.0f}" for e in events))


class Tuned:
    """A kernel with some of its launch arguments replaced; the grid stays as it is."""

    def __init__(self, kernel, **instead):
        self.kernel, self.instead = kernel, instead

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*args, **(kwargs | self.instead))


SWEEPS = (  # module, kernel, call, choices that leave the number of programs as it is
    (gs, "_gradient_statistics_kernel", "gradient_statistics factored", ("BLOCK_N", "STEPS"), ((16, 8), (32, 4), (64, 2))),
    (ug, "_direction_squares_kernel", "unit_gain factored", ("BLOCK_N", "STEPS"), ((8, 8), (16, 4), (32, 2))),
    (bm, "_blend_moment_kernel", "blend_moment factored", ("BLOCK_P", "BLOCK_K"), ((4, 512), (8, 256), (16, 128))),
    (st, "_step_trits_kernel", "step_by_moment", ("BLOCK_P", "STEPS"), ((8, 8), (16, 4), (32, 2))),
)


def sweep(watch):
    known = {name: call for name, call, _ in calls(8192, 8192)}
    for module, name, call, keys, choices in SWEEPS:
        kernel, line = getattr(module, name), []
        for values, warps in itertools.product(choices, (2, 4, 8)):
            setattr(module, name, Tuned(kernel, **dict(zip(keys, values, strict=True)), num_warps=warps))
            try:
                line.append(f"{values} w{warps} {microseconds(watch, known[call], 0.05):.0f}")
            except Exception as error:
                line.append(f"{values} w{warps} {type(error).__name__}")
        setattr(module, name, kernel)
        say(call, "us:", "; ".join(line))


if __name__ == "__main__":
    print(torch.__version__, __import__("triton").__version__, torch.cuda.get_device_name())
    verify()
    watch = Stopwatch(DEVICE)
    tables(watch)
    whole(watch)
    if "sweep" in sys.argv:
        sweep(watch)
    say("done")
