"""Time the packed products and the whole update against cuBLAS, in one run: `make bench`.

Every call is a replay from a cold cache; ours and the peer's take turns, and a ratio is the median
over the turns. See `arbcli.verify.timing`. cuBLAS multiplies normal weights, as a float baseline
has them; large products are also compared with cuBLAS of our own, which takes it a little less
time, as zeros save power.

A product of few rows is hardly longer than its launch, which no model pays for each: its products
are launched as one graph. So these are also timed in a row, as many different matrices as are eight
times the cache or more, and a figure is one of them.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from arbcli.config.presets import preset
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.prepacked import prepack
from arbcli.kernels.matmul.prepacked_rows import prepacked_rows
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.kernels.matmul.row_matmul import row_matmul
from arbcli.kernels.matmul.ternary_matmul import ternary_matmul, ternary_matmul_grad_x
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.model.packed import TernaryTensor
from arbcli.model.updater import Updater
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timing import Stopwatch, measure_roofline, median_ratio, time_calls
from benchmarks import results

DEVICE = torch.device("cuda")
GROUP_SIZE = 32


class Comparisons:
    """Times ours and cuBLAS in turns, prints a line a pair, and keeps the rows."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch(DEVICE)
        self.roofline = measure_roofline(self.stopwatch)
        self.rows: list[dict] = []

    def compare(
        self,
        size: tuple[int, int],
        rows: int,
        what: str,
        ours: Callable,
        peer: Callable,
        *,
        number: int = 1,
        weight: Tensor | None = None,
    ) -> None:
        """Time a pair.

        Args:
            size: of the matrix, outputs and inputs.
            rows: of the activations.
            what: is done.
            ours: does it `number` times.
            peer: does the same.
            number: that figures are divided by.
            weight: whose bytes are compared with the copy bandwidth.
        """
        us, peer_us = time_calls([ours, peer], self.stopwatch, seconds=0.6)
        time_us, peer_each = median(us) / number, median(peer_us) / number
        ratio, share = median_ratio(us, peer_us), None
        if weight is not None:
            share = 1e6 * weight.nbytes / self.roofline.bytes_per_second / time_us
        name = "x".join(map(str, size))
        self.rows.append(
            {
                "size": name,
                "rows": rows,
                "what": what,
                "us": round(time_us, 2),
                "peer_us": round(peer_each, 2),
                "ratio": round(ratio, 4),
                "copy_share": share and round(share, 4),
            }
        )
        print(
            f"{name} {what}, M = {rows}: {time_us:.1f} us, cuBLAS {peer_each:.1f} us:"
            f" {ratio:.3f} x its speed"
            + (f", {share:.0%} of the copy bandwidth" if share is not None else ""),
            flush=True,
        )


def compare_few_rows(comparisons: Comparisons, size: int) -> None:
    """Compare products of few rows as in generation: one alone, and each of many in a row."""
    rng = CaseGenerator(0, DEVICE, torch.bfloat16)
    matrices = [
        rng.packed(size, size, GROUP_SIZE, digits="trit")
        for _ in range(8 * comparisons.stopwatch.cache_bytes // (size * size // 4) + 1)
    ]
    weights = [prepack(one) for one in matrices]
    twins = [randn(size, size) for _ in matrices]

    def multiply_in_a_row(multiply: Callable, x: Tensor, many: list) -> None:
        with overlapping():
            for weight in many:
                multiply(x, weight)

    def twins_in_a_row(x: Tensor) -> None:
        for weight in twins:
            torch.matmul(x, weight.T)

    for rows in (1, 2, 4, 8):
        x = randn(rows, size)
        multiply = row_matmul if rows == 1 else prepacked_rows
        one, one_twin = partial(multiply, x, weights[0]), partial(torch.matmul, x, twins[0].T)
        all_, all_twins = (
            partial(multiply_in_a_row, multiply, x, weights),
            partial(twins_in_a_row, x),
        )
        for what, ours, peer, number in (
            ("prepacked", one, one_twin, 1),
            ("prepacked, in a row", all_, all_twins, len(weights)),
        ):
            comparisons.compare(
                (size, size), rows, what, ours, peer, number=number, weight=weights[0].pieces
            )


def randn(*shape: int) -> torch.Tensor:
    """Draw bf16 activations."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def main() -> None:
    """Print a line a comparison, and write the rows."""
    args = results.options("products", "Time products and updates against cuBLAS.").parse_args()
    comparisons = Comparisons()
    roofline = comparisons.roofline
    print(
        f"copy {roofline.bytes_per_second / 1e12:.2f} TB/s, products"
        f" {roofline.flops_per_second / 1e12:.0f} TFLOP/s, a launch {roofline.launch_us:.1f} us"
    )
    for size in (8192, 16384):
        compare_few_rows(comparisons, size)
        compare_products(comparisons, size)
    for outputs, inputs, rows in ((8192, 8192, 8192), (11264, 2048, 16384)):
        compare_updates(comparisons, outputs, inputs, rows)
    command = results.command_line("products")
    results.save("products", comparisons.rows, command=command, folder=args.out)


def compare_products(comparisons: Comparisons, size: int) -> None:
    """Compare products of matrices as they are trained."""
    packed = CaseGenerator(0, DEVICE, torch.bfloat16).packed(size, size, GROUP_SIZE, digits="trit")
    weight, own = randn(size, size), decode_weight(packed)
    for rows in (1, 2, 4, 8, 16, 32, 64, *((4096, 8192, 16384) if size == 8192 else ())):
        x = randn(rows, size)
        forward = partial(ternary_matmul, x, packed)
        grad_x = partial(ternary_matmul_grad_x, x, packed)
        calls = [("forward", forward, weight.T)]
        if rows >= 4096:
            calls += [
                ("grad_x", grad_x, weight),
                ("forward, cuBLAS of these weights", forward, own.T),
                ("grad_x, cuBLAS of these weights", grad_x, own),
            ]
            for what, transposed in (("forward in fp8", False), ("grad_x in fp8", True)):
                ours = partial(multiply_in_eight_bits, x, packed, transposed)
                calls.append((what, ours, weight.T))
        for what, ours, w in calls:
            comparisons.compare((size, size), rows, what, ours, partial(torch.matmul, x, w))


def multiply_in_eight_bits(x: Tensor, packed: Packed, transposed: bool) -> Tensor:
    """Round activations and multiply, as a layer does."""
    return fp8_matmul(*quantise_rows(x), packed, transposed)


def compare_updates(comparisons: Comparisons, outputs: int, inputs: int, rows: int) -> None:
    """Compare forming a gradient and the whole update with cuBLAS forming it alone."""
    grad_y, x = randn(rows, outputs), randn(rows, inputs)

    def form() -> Tensor:
        return grad_y.T @ x

    for rule, direction in (
        ("moment", "factored"), ("nibble", "factored"), ("carry", "factored"),
        ("moment", "orthogonal"),
    ):  # fmt: skip
        config = preset("tiny", rule=rule, direction=direction)
        with DEVICE:
            tensor = TernaryTensor(outputs, inputs, config.layer_spec(), area="mlp", std=0.02)
        tensor.initialise(0, 0)
        updater = Updater([tensor], 0, torch.bfloat16)
        updater.begin(3, 1.0)
        comparisons.compare(
            (outputs, inputs), rows, f"update, {rule} {direction}",
            lambda u=updater, t=tensor: u(t, form()), form,
        )  # fmt: skip


if __name__ == "__main__":
    main()
