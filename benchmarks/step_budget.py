"""Break down the time of a training step, next to the minimum that this machine could take.

    python -m benchmarks.step_budget [MODEL...] [--out DIR]

A step is counted, and others are traced, one kernel after another, before it is captured and timed.
Kernels are sorted by what they do. Next to the time of each kind stands its floor:

- **products**: the time of the matrix library for the same shapes, each alone, on random data, from
  a cold cache. Kernels of our own that multiply (grouped, or symmetric) count by their operations,
  at the library's rate for 8192 x 8192 x 8192.
- **attention**: its operations at that rate, seven products of queries, keys and values, and of
  causal attention the half. Or its bytes, if they take longer.
- **all others**: every tensor that a launch is given, read or written once, at the rate of a copy.
  A tensor that is read and written counts once, so no kernel can be faster.

MODEL is one of `MODELS`.
"""

import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from arbcli.kernels.runtime import merged
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.updater import Updater
from arbcli.training import trainer as training
from arbcli.training.trainer import Trainer
from arbcli.verify.timing import Roofline, Stopwatch, measure_roofline, time_calls
from benchmarks import results
from benchmarks.measuring import empty, run_steps, trainer_of

MODELS: dict[str, dict[str, Any]] = {
    "base": {"preset": "base", "batch": 16},
    "1b": {"preset": "1b", "batch": 8},
    "base, factored": {"preset": "base", "batch": 16, "direction": "factored"},
    "1b, factored": {"preset": "1b", "batch": 8, "direction": "factored"},
    "1b, fp8": {"preset": "1b", "batch": 8, "compute": "fp8"},
    "hnet-base": {"preset": "hnet-base", "batch": 8},
    "arb-long": {"preset": "arb-long", "batch": 2},
    "arb-3b": {"preset": "arb-3b", "batch": 8},
}
"""Options by name."""
PRODUCTS, ATTENTION, NORMS, DECODING = "products", "attention", "norms and gates", "decoding"
STEPPING, OF_UPDATE, REST = "update", "products of the update", "rest"
KINDS = (PRODUCTS, ATTENTION, NORMS, DECODING, OF_UPDATE, STEPPING, REST)
PACKAGES = {
    "attention": ATTENTION,
    "norm": NORMS,
    "codec": DECODING,
    "matmul": PRODUCTS,
    "update": STEPPING,
}
"""Kinds of our kernels, by their package in `arbcli.kernels`."""
MODULES = {
    "quantise_rows": DECODING,
    "round_nvfp4": DECODING,
    "newton_schulz": PRODUCTS,
    "rotary_norm": NORMS,
}
"""The same by module, where its package says something else."""
LIBRARIES = {ATTENTION: r"attention|flash|fmha|sdpa", PRODUCTS: r"gemm|nvjet|cutlass|cublas|splitk"}
"""Patterns of the names of other kernels, by kind; the first that matches counts."""
MULTIPLIED = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1, "_scaled_grouped_mm": 0}
"""Operations of torch that are products, and the place of the first factor."""
OF_ATTENTION = 3.5
"""Forwards that attention's both passes are worth: they have seven products, and a forward two."""
ROUNDS, STEPS = 5, 5
TRACED = 3
"""Steps."""
UPDATE = "updates"
"""Range of a trace."""
METHODS = ("__call__", "step_held", "finish")
"""Methods of the updater, which launch all kernels of updates."""
PRODUCT_SECONDS = 0.05
LISTED = 20
"""Kernels of a row, those that take longest."""


@dataclass
class Work:
    """Work of a step by kind."""

    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of all tensors that are passed to launches."""
    operations: Counter[str] = field(default_factory=Counter)
    """Operations of attention and of products by own kernels."""
    products: Counter[tuple] = field(default_factory=Counter)
    """How often the library multiplies, by kind, operation and the forms of its arguments."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Kind of each kernel of ours, by its name."""
    updating: bool = False
    """Whether an update is under way."""
    device: str = "cuda"
    """Type of the device whose tensors count."""

    def kind(self, kind: str) -> str:
        """Name the kind of something, which updates have of their own."""
        if not self.updating:
            return kind
        return OF_UPDATE if kind == PRODUCTS else STEPPING

    def launched(self, kernel: Any, arguments: dict[str, Any]) -> None:
        """Count a launch of a kernel of ours."""
        *_, package, module = kernel.fn.__module__.split(".")
        kind = MODULES.get(module, PACKAGES.get(package, REST))
        name = kernel.fn.__name__
        self.kernels[name] = kind
        count = OPERATIONS.get(name, lambda **_: 0)(**arguments)
        self.operations[self.kind(kind)] += count
        if not count or kind != PRODUCTS:
            self.bytes[self.kind(kind)] += self.num_bytes(arguments.values())

    def num_bytes(self, values: Iterable[Any]) -> int:
        """Count the bytes of all tensors of the device among values, each once."""
        sizes: dict[int, int] = {}
        for tensor in tensors_of(values):
            if tensor.device.type == self.device:
                size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
                sizes[tensor.data_ptr()] = max(size, sizes.get(tensor.data_ptr(), 0))
        return sum(sizes.values())


def places_of(tensors: Iterable[Tensor]) -> set[int]:
    """List the memory that tensors are in."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """List the tensors among values, those of tuples and descriptors too."""
    for value in values:
        value = getattr(value, "base", value)  # of a descriptor
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(value)


def count_symmetric(x_desc: Any, N: int, K: int, **_: Any) -> int:
    """Count the operations of a product with a symmetric result, half of which is needed."""
    matrices: int = x_desc.base.shape[0]
    return matrices * N * (N + 1) * K


def count_grouped(S: int, N: int, K: int, **_: Any) -> int:
    """Count the operations of products of experts: each of S rows is multiplied once."""
    return 2 * S * N * K


def count_compressed(
    x_ptr: Tensor, T: int, SIZE: int, WINDOW: int, MOST: int, RATIO: int, CHOSEN: bool, **_: Any
) -> int:
    """Count the operations of attention to a window and to compressed entries, both passes."""
    batch, (heads, width) = len(x_ptr), x_ptr.shape[2:]
    entries = SIZE * T if CHOSEN else sum(min(t // RATIO, MOST) for t in range(T))
    seen = entries + sum(min(t + 1, WINDOW) for t in range(T))
    return round(OF_ATTENTION * 4 * batch * heads * width * seen)


OPERATIONS: dict[str, Callable[..., int]] = {
    "_symmetric_kernel": count_symmetric,
    "_grouped_matmul_kernel": count_grouped,
    "_grouped_grad_w_kernel": count_grouped,
    "_compressed_attention_kernel": count_compressed,
}
"""Functions that count the operations of our kernels from their arguments."""


def count_library_attention(name: str, arguments: dict[str, Any]) -> int:
    """Count the operations of attention by a library, both passes, when its forward is called."""
    if "backward" in name:
        return 0
    q, k = arguments["query"], arguments["key"]
    places = (1, 2) if name == "_flash_attention_forward" else (2, 1)
    length, heads = (q.shape[place] for place in places)
    keys = k.shape[places[0]]
    window = arguments.get("window_size_left")
    seen = length * keys
    if window is not None and window >= 0:
        seen = sum(min(t, window) + 1 for t in range(length))
        seen += 0 if arguments["is_causal"] else seen - length
    elif arguments["is_causal"]:
        seen = length * (length + 1) // 2
    return round(OF_ATTENTION * 4 * q.shape[0] * heads * q.shape[-1] * seen)


def form_of(value: Any) -> Any:
    """Describe an argument so that another like it can be made."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype
    return value


class Operations(TorchDispatchMode):
    """Counts what torch's own operations do."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, work = func.overloadpacket.__name__, self.work
        results_ = [*tensors_of([result])]
        if name in MULTIPLIED:
            forms = tuple(map(form_of, args)), tuple((k, form_of(v)) for k, v in kwargs.items())
            work.products[work.kind(PRODUCTS), func, *forms] += 1
            return result
        inputs = [*tensors_of(args), *tensors_of(kwargs.values())]
        views = not func._schema.is_mutable and places_of(results_) <= places_of(inputs)
        if views or not results_ or not inputs:  # also what only asks for memory
            return result
        if "attention" in name:
            arguments = (
                dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            )
            work.operations[ATTENTION] += count_library_attention(name, arguments)
            work.bytes[ATTENTION] += work.num_bytes([*inputs, *results_])
        elif not name.startswith(("empty", "new_empty", "detach")):
            work.bytes[work.kind(REST)] += work.num_bytes([*inputs, *results_])
        return result


@contextmanager
def counting(work: Work) -> Iterator[None]:
    """Count all that is done inside."""
    merge = merged._launch
    nested = False

    def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        if not nested:
            work.launched(kernel, dict(zip(kernel.arg_names, args, strict=False)) | options)
        previous(kernel, grid)(*args, **options)

    def launch_merged(*kinds: merged.Arguments) -> None:
        nonlocal nested
        for one in (one for wave, *_ in kinds for one in wave):
            values = (*one.arguments, *one.constants)
            work.launched(one.kernel, dict(zip(one.kernel.arg_names, values, strict=True)))
        if not work.updating:  # within updates the name says nothing
            (first, *_), *_ = kinds[0]
            work.kernels["_merged_kernel"] = work.kernels[first.kernel.fn.__name__]
        nested = True
        merge(*kinds)
        nested = False

    def marked(method: str) -> Any:
        run = getattr(Updater, method)

        @wraps(run)
        def marked_run(*args: Any, **options: Any) -> Any:
            previous, work.updating = work.updating, True
            try:
                return run(*args, **options)
            finally:
                work.updating = previous

        return mock.patch.object(Updater, method, marked_run)

    previous = launcher()
    with ExitStack() as stack:
        for method in METHODS:
            stack.enter_context(marked(method))
        stack.enter_context(mock.patch.object(merged, "_launch", launch_merged))
        stack.enter_context(replaced_launches(launch))
        stack.enter_context(Operations(work))
        yield


def launcher() -> Callable:
    """Return the launch function of `kernel[grid]`."""
    from triton.runtime.jit import KernelInterface

    return KernelInterface.__getitem__


def count_step(trainer: Trainer) -> Work:
    """Count the work of one step, which is done."""
    work = Work(device=trainer.device.type)
    with counting(work):
        trainer.train_step()
    return work


def annotated(method: str) -> Any:
    """Wrap a method of the updater in a range of the trace."""
    run = getattr(Updater, method)

    @wraps(run)
    def marked_run(*args: Any, **options: Any) -> Any:
        with record_function(UPDATE):
            return run(*args, **options)

    return mock.patch.object(Updater, method, marked_run)


def trace(trainer: Trainer) -> list[dict[str, Any]]:
    """Trace some steps, after one that compiles."""
    patches = [annotated(method) for method in METHODS]
    for patch in patches:
        patch.start()
    run_steps(trainer, training.EAGER_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run_steps(trainer, TRACED)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for patch in patches:
        patch.stop()
    return events


def kernel_times(events: Iterable[dict[str, Any]], work: Work) -> tuple[Counter, Counter]:
    """Add up the microseconds of traced kernels by kind, and by name with its kind.

    Args:
        events: of a trace.
        work: whose `kernels` have the kinds of ours.
    """
    events = [*events]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] == UPDATE
    )  # fmt: skip
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    at = 0
    launched = (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    for event in sorted(launched, key=lambda event: event["ts"]):
        while at < len(spans) and spans[at][1] <= event["ts"]:
            at += 1
        work.updating = at < len(spans) and spans[at][0] <= event["ts"]
        name = event["name"].split("(")[0].removeprefix("void ")
        known = (kind for kind, names in LIBRARIES.items() if re.search(names, name.lower()))
        kind = work.kind(work.kernels.get(name) or next(known, REST))
        by_kind[kind] += event["dur"]
        by_name[f"{kind}: {name[:80]}"] += event["dur"]
    return by_kind, by_name


def made(form: Any, device: torch.device) -> Any:
    """Make an argument of this form, a tensor of random numbers."""
    if not (isinstance(form, tuple) and form[:1] == ("tensor",)):
        return form
    _, shape, strides, dtype = form
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    flat = torch.randn(max(size, 0), device=device).to(dtype)
    return flat.as_strided(shape, strides)


def shape_of(func: Any, args: tuple) -> tuple[int, ...]:
    """Return M, N, K of a product, preceded by the number of products if there are several."""
    first = MULTIPLIED[func.overloadpacket.__name__]
    (_, a, *_), (_, b, *_) = args[first : first + 2]
    return (*a[:-1], b[-1], a[-1])


def time_products(work: Work, stopwatch: Stopwatch) -> list[dict[str, Any]]:
    """Time every product of the library alone."""
    rows = []
    for (kind, func, args, kwargs), count in work.products.items():
        arguments = [made(form, stopwatch.device) for form in args]
        named = {name: made(form, stopwatch.device) for name, form in kwargs}
        (times,) = time_calls([partial(func, *arguments, **named)], stopwatch, PRODUCT_SECONDS)
        shape = shape_of(func, args)
        us = statistics.median(times)
        rows.append(
            {
                "kind": kind,
                "operation": func.overloadpacket.__name__,
                "shape": "x".join(map(str, shape)),
                "times": count,
                "us": round(us, 2),
                "tflops": round(2 * math.prod(shape) / us / 1e6, 1),
            }
        )
    return sorted(rows, key=lambda row: -row["times"] * row["us"])


def floors(work: Work, products: list[dict[str, Any]], roofline: Roofline) -> dict[str, float]:
    """Return the minimum milliseconds of each kind."""
    minima = {}
    for kind in KINDS:
        of_library = sum(row["times"] * row["us"] for row in products if row["kind"] == kind)
        computed = 1e3 * work.operations[kind] / roofline.flops_per_second
        moved = 1e3 * work.bytes[kind] / roofline.bytes_per_second
        if kind == ATTENTION:
            minima[kind] = max(computed, moved)
        else:
            minima[kind] = of_library / 1e3 + computed + moved
    return minima


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Count, trace and time the step of one model."""
    empty()
    eager = training.EAGER_STEPS + TRACED + 1  # `trace` begins with as many that compile
    with deterministic(), mock.patch.object(training, "EAGER_STEPS", eager):
        trainer = trainer_of(options)
        events = trace(trainer)
        work = count_step(trainer)
        run_steps(trainer, 2)
        seconds = [run_steps(trainer, STEPS) for _ in range(ROUNDS)]
        weights, config = trainer.num_weights, trainer.config
        del trainer
    empty()
    by_kind, by_name = kernel_times(events, work)
    stopwatch = Stopwatch(torch.device("cuda"))
    roofline = measure_roofline(stopwatch)
    products = time_products(work, stopwatch)
    least = floors(work, products, roofline)
    return {
        "weights": weights,
        "batch": options["batch"],
        "ctx": config.model.ctx,
        "compute": config.compute,
        "rule": config.model.rule,
        "direction": config.model.direction,
        "step_ms": round(1e3 * statistics.median(seconds), 3),
        "kernel_ms": round(sum(by_kind.values()) / 1e3 / TRACED, 3),
        "copy_bytes_per_second": round(roofline.bytes_per_second),
        "operations_per_second": round(roofline.flops_per_second),
        "kinds": {
            kind: {"ms": round(by_kind[kind] / 1e3 / TRACED, 3), "floor_ms": round(least[kind], 3)}
            for kind in KINDS
        },
        "by_kernel_ms": milliseconds(Counter(dict(by_name.most_common(LISTED)))),
        "products": products,
    }


def milliseconds(microseconds: Counter) -> dict[str, float]:
    """Write the microseconds of all traced steps as milliseconds of one."""
    return {name: round(us / 1e3 / TRACED, 3) for name, us in microseconds.items()}


def main() -> None:
    """Print what each model's step is made of, and write its row."""
    parser = results.options("step_budget", "Compare the parts of a training step with floors.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    args = parser.parse_args()
    for name in args.models or MODELS:
        row: dict[str, Any] = {"model": name} | measure(MODELS[name])
        print(f"{name}: {row['step_ms']} ms captured, {row['kernel_ms']} of kernels")
        for kind, times in row["kinds"].items():
            print(f"  {kind:24}{times['ms']:10.3f} ms, at least {times['floor_ms']:10.3f}")
        print(flush=True)
        command = results.command_line("step_budget")
        results.save("step_budget", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()
