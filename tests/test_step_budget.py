"""Of the benchmarks: the budget of a step, and the law of size and length."""

import math

import pytest
import torch

from arbcli.data.opening import open_texts
from arbcli.model.operations import step_operations
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks.fits import FEWEST, Law, between, fit
from benchmarks.results import load
from benchmarks.step_budget import (
    ATTENTION,
    DECODING,
    NORMS,
    OF_TWIN,
    OF_UPDATE,
    PRODUCTS,
    REST,
    STEPPING,
    Work,
    count_step,
    floors,
    kernel_times,
    made,
    shape_of,
)
from benchmarks.tables.rows import rows_of


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(bytes(range(256)) * 40)
    config = new_config(
        preset="tiny", dim=64, layers=2, heads=2, ffn=96, ctx=32, batch=2, steps=2,
        device="cpu", backend="torch", compute="fp32", data=[str(path)],
    )  # fmt: skip
    texts = open_texts(config.data, None, seed=0, context=32)
    return config, count_step(Trainer(config, texts))


def of_products(work, kind):
    return sum(
        2 * times * math.prod(shape_of(func, args))
        for (where, func, args, _), times in work.products.items()
        if where == kind
    )


def test_products_and_attention_are_those_that_the_model_says(counted):
    config, work = counted
    model, windows = config.model, config.batch
    attention = 12 * windows * 2 * model.ctx**2 * 64
    assert of_products(work, PRODUCTS) == windows * step_operations(model) - attention
    # causal, with seven products for the six of a forward and two backward passes over it
    causal = attention * 7 / 6 * (model.ctx + 1) / (2 * model.ctx)
    assert work.operations[ATTENTION] == pytest.approx(causal)
    assert of_products(work, OF_UPDATE) > 0
    assert work.bytes[REST] > 0


def event(name, begin, length, kind="kernel"):
    return {"cat": kind, "name": name, "ts": begin, "dur": length}


def test_kernels_are_sorted_by_their_package_their_name_and_their_update():
    work = Work(kernels={"_rms_norm_kernel": NORMS, "_merged_kernel": STEPPING,
                         "_symmetric_kernel": PRODUCTS})  # fmt: skip
    events = [
        event("_rms_norm_kernel", 0, 1),
        event("nvjet_sm90_tst_128x256", 1, 2),
        event("void pytorch_flash::flash_bwd_kernel<cutlass>(Params)", 3, 4),
        event("void at::native::reduce_kernel<512>(int)", 7, 8),
        event("updates", 20, 40, "gpu_user_annotation"),
        event("_merged_kernel", 20, 16),
        event("_symmetric_kernel", 36, 3),
        event("nvjet_sm90_tst_128x256", 39, 1),
        event("Memset (Device)", 40, 5, "gpu_memset"),
        event("not a kernel", 41, 5, "cpu_op"),
    ]
    by_kind, by_name = kernel_times(reversed(events), work)
    assert by_kind == {NORMS: 1, PRODUCTS: 2, ATTENTION: 4, REST: 8, STEPPING: 21, OF_UPDATE: 4}
    assert by_name[f"{OF_UPDATE}: nvjet_sm90_tst_128x256"] == 1


def test_kernels_of_the_twin_are_sorted_by_their_names():
    events = [
        event("triton_poi_fused__to_copy_t_3", 0, 1),
        event("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_7", 1, 2),
        event("triton_poi_fused__scaled_dot_product_flash_attention_5", 3, 4),
        event("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)", 7, 8),
        event("void pytorch_flash::flash_bwd_kernel<cutlass>(Params)", 20, 16),
        event("nvjet_sm90_tst_128x256", 40, 32),
        event("void at::native::reduce_kernel<512>(int)", 80, 64),
    ]
    by_kind, _ = kernel_times(events, Work(), OF_TWIN)
    assert by_kind == {DECODING: 1, NORMS: 6, STEPPING: 8, ATTENTION: 16, PRODUCTS: 32, REST: 64}


def test_floors_are_products_alone_operations_and_bytes():
    from arbcli.verify.timing import Roofline

    work = Work()
    work.bytes.update({NORMS: 4_000_000, ATTENTION: 1_000_000})
    work.operations.update({ATTENTION: 10**10, OF_UPDATE: 10**9})
    products = [{"kind": PRODUCTS, "times": 3, "us": 50.0}]
    found = floors(work, products, Roofline(4e12, 1e15, 5.0))
    assert found == {
        PRODUCTS: pytest.approx(0.15), ATTENTION: pytest.approx(0.01), NORMS: pytest.approx(0.001),
        OF_UPDATE: pytest.approx(0.001), "decoding": 0, STEPPING: 0, REST: 0,
    }  # fmt: skip


def test_argument_has_its_recorded_form():
    form = ("tensor", (3, 4), (1, 3), torch.bfloat16)
    again = made(form, torch.device("cpu"))
    assert (again.shape, again.stride(), again.dtype) == ((3, 4), (1, 3), torch.bfloat16)
    assert made(False, torch.device("cpu")) is False


LAW = Law(floor=0.8, of_size=0.25, of_length=0.6, size_exponent=0.35, length_exponent=0.45)


def rows(noise=0.0):
    found = []
    for weights in (0.9e6, 3.3e6, 10.8e6, 25.9e6):
        for steps in (250, 500, 1000, 2000):
            read = 8192 * steps
            loss = LAW.loss(weights, read) * (1 + noise * math.sin(9 * len(found)))
            row = {"weights": weights, "steps": steps, "bytes": read, "held_out_nats": loss}
            found.append(row)
    return found


def test_exact_losses_give_their_law():
    found = fit(rows())
    assert found.law == pytest.approx(LAW, abs=1e-6)
    assert found.residual < 1e-9
    assert max(found.errors) < 1e-6


def test_errors_grow_with_the_noise():
    small, large = fit(rows(0.001)), fit(rows(0.01))
    assert large.residual > 3 * small.residual
    assert large.errors.length_exponent > small.errors.length_exponent
    assert fit(rows()[: FEWEST - 1]) is None


def test_number_that_the_points_do_not_determine_without_one_has_no_error():
    """With two sizes any exponent has an E and an A that give the same losses; so with lengths."""
    three_sizes = [row for row in rows() if row["weights"] < 25e6]
    lone_size = [row for row in three_sizes if row["weights"] != 3.3e6 or row["steps"] == 500]
    errors = fit(lone_size).errors
    assert [math.isnan(error) for error in errors] == [True, True, False, True, False]
    three_lengths = [row for row in rows() if row["steps"] > 250]
    lone_length = [row for row in three_lengths if row["steps"] != 500 or row["weights"] == 3.3e6]
    errors = fit(lone_length).errors
    assert [math.isnan(error) for error in errors] == [True, False, True, False, True]


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "moment, all digits", "nibble, all digits"])
def test_last_bits_of_losses_change_no_digit_of_a_law(kind):
    """As those of a sum do, which depend on a processor's instructions."""
    measured = rows_of(load("scaling"), kind=kind)
    first = fit(measured)
    for sign in (1, -1):
        changed = [
            row | {"held_out_nats": row["held_out_nats"] * (1 + sign * (index % 3) * 1e-15)}
            for index, row in enumerate(measured)
        ]
        second = fit(changed)
        assert second.law == pytest.approx(first.law, abs=1e-7)
        assert second.errors == pytest.approx(first.errors, abs=1e-7, nan_ok=True)


def test_loss_between_two_lengths_is_between_theirs():
    some = rows()[:4]
    losses = [row["held_out_nats"] for row in some]
    assert between(some, 500) == pytest.approx(losses[1])
    middle = math.sqrt(losses[1] * losses[2])
    assert between(some, math.sqrt(500 * 1000)) == pytest.approx(middle)
    assert between(some, 9000) == pytest.approx(losses[3])
