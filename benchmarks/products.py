"""Time the packed products and the whole update beside cuBLAS, in one run: `make bench`.

Every call is a replay from a cold cache; ours and the peer's take turns, and a ratio is the median
over the turns. See `arbcli.verify.timing`. cuBLAS multiplies normal weights, as a float twin has
them; large products are also compared with cuBLAS of our own, which takes it a little less time, as
zeros save power.

A product of few rows is hardly longer than its launch, which no model pays for each: its products
are launched as one graph. So these are also timed in a row, as many different matrices as are eight
times the cache or more, and a figure is one of them.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from arbcli.config.model import preset
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.matmul.arranged_matmul import arrange, arranged_matmul
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.kernels.matmul.ternary_matmul import ternary_matmul, ternary_matmul_grad_x
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.model.packed import TernaryTensor
from arbcli.train.updater import Updater
from arbcli.verify.timing import Stopwatch, measure_roofline, median_ratio, time_calls

DEVICE = torch.device("cuda")
GROUP_SIZE = 32


def compare(
    stopwatch: Stopwatch, name: str, ours: Callable, peer: Callable, number: int = 1
) -> float:
    """Print what ours and the peer take, and how many times as fast ours is.

    Args:
        stopwatch: of the device.
        name: of the work.
        ours: does it `number` times.
        peer: does the same.
        number: that figures are divided by.

    Returns:
        Microseconds of ours.
    """
    us, peer_us = time_calls([ours, peer], stopwatch, seconds=0.6)
    each, peer_each = median(us) / number, median(peer_us) / number
    print(
        f"{name:60} {each:9.1f} us, cuBLAS {peer_each:9.1f} us:"
        f" {median_ratio(us, peer_us):.3f} x its speed",
        flush=True,
    )
    return each


def compare_few_rows(stopwatch: Stopwatch, size: int, bytes_per_second: float) -> None:
    """Compare products of few rows by arranged matrices: one alone, and each of many in a row."""
    generator = torch.Generator(DEVICE)
    many = [
        arrange(random_packed(size, size, GROUP_SIZE, generator, spread=8))
        for _ in range(8 * stopwatch.cache_bytes // (size * size // 4) + 1)
    ]
    twins = [randn(size, size) for _ in many]

    def in_a_row(x: torch.Tensor) -> None:
        with overlapping():
            for weight in many:
                arranged_matmul(x, weight)

    def twins_in_a_row(x: torch.Tensor) -> None:
        for weight in twins:
            torch.matmul(x, weight.T)

    floor_us = 1e6 * many[0].pieces.nbytes / bytes_per_second
    for rows in (1, 2, 4, 8):
        x = randn(rows, size)
        name = f"{size}^2 forward, M = {rows}, arranged"
        alone = partial(arranged_matmul, x, many[0]), partial(torch.matmul, x, twins[0].T)
        row = partial(in_a_row, x), partial(twins_in_a_row, x)
        for label, calls, number in (("", alone, 1), (f", {len(many)} in a row", row, len(many))):
            us = compare(stopwatch, name + label, *calls, number)
            print(f"{'':60} {floor_us / us:.0%} of the copy bandwidth", flush=True)


def randn(*shape: int) -> torch.Tensor:
    """Draw bf16 activations."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def main() -> None:
    """Print a line a comparison."""
    stopwatch = Stopwatch(DEVICE)
    roofline = measure_roofline(stopwatch)
    print(
        f"copy {roofline.bytes_per_second / 1e12:.2f} TB/s, products"
        f" {roofline.flops_per_second / 1e12:.0f} TFLOP/s, a launch {roofline.launch_us:.1f} us"
    )
    for size in (8192, 16384):
        compare_few_rows(stopwatch, size, roofline.bytes_per_second)
        packed = random_packed(size, size, GROUP_SIZE, torch.Generator(DEVICE), spread=8)
        weight, own = randn(size, size), decode_weight(packed)
        for rows in (1, 2, 4, 8, 16, 32, 64, *((4096, 8192, 16384) if size == 8192 else ())):
            x = randn(rows, size)
            forward = partial(ternary_matmul, x, packed)
            grad_x = partial(ternary_matmul_grad_x, x, packed)
            cublas = partial(torch.matmul, x, weight.T)
            compare(stopwatch, f"{size}^2 forward, M = {rows}", forward, cublas)
            if rows >= 4096:
                for name, ours, w in (
                    ("grad_x", grad_x, weight),
                    ("forward and cuBLAS of these weights", forward, own.T),
                    ("grad_x and cuBLAS of these weights", grad_x, own),
                ):
                    peer = partial(torch.matmul, x, w)
                    compare(stopwatch, f"{size}^2 {name}, M = {rows}", ours, peer)
                for name, transposed in (("forward", False), ("grad_x", True)):
                    compare(
                        stopwatch, f"{size}^2 {name} in fp8, M = {rows}",
                        lambda x=x, packed=packed, t=transposed: fp8_matmul(
                            *quantise_rows(x), packed, t
                        ),
                        cublas,
                    )  # fmt: skip
    for outputs, inputs, rows in ((8192, 8192, 8192), (11264, 2048, 16384)):
        grad_y, x = randn(rows, outputs), randn(rows, inputs)
        for rule, direction in (
            ("moment", "factored"), ("nibble", "factored"), ("carry", "factored"),
            ("moment", "orthogonal"),
        ):  # fmt: skip
            config = preset("tiny", rule=rule, direction=direction)
            with DEVICE:
                tensor = TernaryTensor(outputs, inputs, config, area="mlp", std=0.02)
            tensor.initialise(0, 0)
            updater = Updater([tensor], 0, torch.bfloat16)
            updater.begin(3, 1.0)
            compare(
                stopwatch, f"{outputs}x{inputs} update, M = {rows}, {rule} {direction}",
                lambda u=updater, t=tensor, y=grad_y, x=x: u(t, y.T @ x),
                lambda y=grad_y, x=x: y.T @ x,
            )  # fmt: skip


if __name__ == "__main__":
    main()
