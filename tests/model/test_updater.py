"""The update rules: their equations, their exactness, and what they do with bad gradients."""

import itertools
import math

import numpy as np
import pytest
import torch
from states import assert_same, state_of

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.presets import preset
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.rows.table_rows import TouchedRows
from arbcli.kernels.rows.weighted_rows import touched_rows
from arbcli.kernels.runtime import merged as merged_launches
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.newton_schulz import gram
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.kernels.update.sign_gradient import sign_gradient
from arbcli.model import step_parameters
from arbcli.model import updater as update
from arbcli.model.layers import symbols
from arbcli.model.layers.symbols import SymbolWeight
from arbcli.model.layers.table import TableWeight
from arbcli.model.optimizers import DIRECTIONS, orthogonal
from arbcli.model.optimizers import newton_schulz as iterations
from arbcli.model.optimizers.newton_schulz import newton_schulz, orthogonalise_stacked
from arbcli.model.optimizers.orthogonal import approximate_polar
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules import DIRECTION, RULES, moment
from arbcli.model.rules.base import NUM_STREAMS, STEP_OF_RADIX, blend_gains
from arbcli.model.step_controls import StepControls
from arbcli.model.step_parameters import ROW_CLIP
from arbcli.model.updater import Updater
from arbcli.nn.updater import ModuleUpdater

KERNELS = "triton" if torch.cuda.is_available() else "interpreter"
COMBINATIONS = [
    (rule, direction)
    for rule in RULES
    for direction in (DIRECTIONS if DIRECTION[rule] else (None,))
]


def spec_of(rule: str, direction: str | None, digits: str = "trit") -> LayerSpec:
    given = {"direction": direction} if direction else {}
    return preset("tiny", rule=rule, digits=digits, **given).layer_spec()


def matrix(rows: int, columns: int, spec: LayerSpec, **options) -> TernaryTensor:
    return TernaryTensor(rows, columns, spec, area="mlp", std=0.1, **options)


def updater_of(*tensors: TernaryTensor) -> Updater:
    return Updater(tensors, seed=3, dtype=torch.float32)


def begun(tensor: TernaryTensor) -> tuple[TernaryTensor, Updater]:
    tensor.initialise(seed=0, index=0)
    return tensor, updater_of(tensor)


def build(rule: str, direction: str | None, device, shape=(33, 123), digits="trit"):
    with torch.device(device):
        tensor = matrix(*shape, spec_of(rule, direction, digits))
    return begun(tensor)


def gradient(device, step: int = 0, shape=(33, 123)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator).to(device) * 1e-3


def z_of(tensor: TernaryTensor) -> torch.Tensor:
    trits = unpack_trits(tensor.trits, tensor.in_features).to(torch.int32)
    return trits * tensor.rule.radix + tensor.remainder


@pytest.mark.parametrize("accumulation", [1, 3])
def test_parameters_of_steps_are_those_of_one_python_number_at_a_time(accumulation):
    _, updater = build("moment", "factored", "cpu")
    updater.controls.weight_decay = 0.3
    ((factor, radix, *_),) = updater.controls._paces
    steps = range(2**20 - 3, 2**20 + 60)
    rates = [0.0, *torch.logspace(-9, 1.2, len(steps) - 1, dtype=torch.float64).tolist()]
    parameters_of_steps = updater.step_parameters(steps, rates, accumulation)
    for step, lr, parameters in zip(steps, rates, parameters_of_steps, strict=True):
        updater.begin_step(parameters, accumulation)
        size = lr * factor * radix * STEP_OF_RADIX
        limit = min(round(4 * size * 2**16), 2**30)
        gains = []
        scale_size = lr * factor * 4
        for gain in (scale_size / accumulation, size / accumulation, scale_size, size):
            mantissa, exponent = math.frexp(gain)
            gains.append([round(mantissa * 4096), 12 - exponent] if exponent > -20 else [0, 31])
        for micro in range(accumulation):
            tick = step * accumulation + micro
            updater.begin_micro(micro)
            (sizes,) = updater.controls._sizes.values()
            assert [[*map(int, pair)] for pair in sizes[:4]] == gains
            decay = min(round(lr * factor * 0.3 * 2**17), 2**21)
            numbers = sizes.limit, sizes.weight_decay, sizes.micro_weight_decay
            assert [*map(int, numbers)] == [limit, decay, round(decay / accumulation)]
            micro_limit = round(limit / accumulation)
            assert [int(sizes.micro_limit), int(sizes.row_limit)] == [micro_limit, micro_limit // 2]
            assert int(sizes.step_size) == round(size * 2**32)
            assert int(sizes.micro_step_size) == round(size * 2**32) // accumulation
            controls = updater.controls
            turns = controls.step, controls._turn, controls._micro_turn
            assert [*map(int, turns)] == [step, *(n * 40503 % 2**16 for n in (step, tick))]
            key = stream_keys(controls.seed, torch.tensor(tick, dtype=torch.int32), 1, NUM_STREAMS)
            assert torch.equal(controls.keys, key)
            assert not controls._squares.any()


@pytest.mark.parametrize("rule", RULES)
def test_no_random_stream_of_a_step_has_the_key_of_another(rule, monkeypatch):
    """Of all matrices and of their averages."""
    tensors = [build(rule, DIRECTION[rule], "cpu")[0] for _ in range(3)]
    updater, select, keys = updater_of(*tensors), StepControls.select, []

    def controlled(*arguments):
        control = select(*arguments)
        keys.extend(map(int, control.keys))
        return control

    def move(tensors, key_of, *_):
        keys.extend(int(key_of(tensor)) for tensor in tensors)
        return []

    monkeypatch.setattr(StepControls, "select", controlled)
    monkeypatch.setattr("arbcli.model.averages.move_averages", move)
    updater.begin(0, lr=1.0)
    for tensor in tensors:
        updater(tensor, gradient("cpu"))
    updater._average_weights()
    assert len({*keys}) == len(keys) == len(tensors) * (NUM_STREAMS + 1)


@pytest.mark.parametrize("bad", [torch.nan, 2.0**-70, 2.0**64])
@pytest.mark.parametrize(
    ("kind", "rule", "direction"),
    [(("matrix", "table")[n % 2], *names) for n, names in enumerate(COMBINATIONS)],
)
def test_bad_gradient_changes_nothing(kind, rule, direction, bad, device):
    """Of one number that is not finite, or all of it too small or too large."""
    if kind == "table":
        tensor, updater = table_of(rule, direction)
        where = (touched(2),)
        good, grad = (torch.randn(len(where[0].rows), DIM) for _ in range(2))
    else:
        (tensor, updater), where = build(rule, direction, device), ()
        good, grad = gradient(device), gradient(device, 1)
    if math.isfinite(bad):
        grad.fill_(bad)
    else:
        grad[5, 7] = bad
    updater.begin(0, lr=1.0)
    updater(tensor, good, *where)
    before = state_of(tensor)
    updater.begin(1, lr=1.0)
    updater(tensor, grad, *where)
    updater.finish()
    assert_same(state_of(tensor), before)
    nonfinite = int(not math.isfinite(bad) or bad > 1)
    # rows that no byte chose are nothing to count
    counted = {"nonfinite_steps": nonfinite, "refused": int(kind == "matrix")}
    assert updater.counters() == counted
    updater.begin(2, lr=1.0)
    updater(tensor, good.clone(), *where)
    updater.finish()
    assert updater.counters() == counted  # a step that follows is none of them


def set_least_products(monkeypatch, least: int) -> None:
    monkeypatch.setattr(iterations, "WIDE_PRODUCTS", dict.fromkeys(("cpu", "cuda"), least))


@pytest.fixture(params=["steps", "composed"])
def composed(request, monkeypatch):
    """Whether small wide matrices have their Newton-Schulz steps composed, as large ones have."""
    on = request.param == "composed"
    set_least_products(monkeypatch, 0 if on else 2**62)
    return on


def iterated(grad: torch.Tensor) -> torch.Tensor:
    """Iterate step by step in float64."""
    x = grad.double() / torch.linalg.matrix_norm(grad.double(), keepdim=True).clamp(min=1e-30)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        square = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
        polynomial = b * square + c * square @ square
        x = a * x + (polynomial @ x if x.shape[-2] <= x.shape[-1] else x @ polynomial)
    return x


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def count_grams(monkeypatch) -> list[torch.Size]:
    shapes = []
    monkeypatch.setattr(iterations, "gram", lambda x: shapes.append(x.shape) or gram(x))
    return shapes


@pytest.mark.parametrize("shape", [(33, 123), (30, 45), (3, 16, 64), (2, 200, 17)], ids=str)
def test_newton_schulz_is_the_iteration(shape, composed, device, monkeypatch):
    grams = count_grams(monkeypatch)
    grad = gradient(device, shape=shape)
    polar = newton_schulz(grad, torch.float32)
    assert polar.shape == grad.shape
    assert relative_error(polar, iterated(grad)) < 1e-4
    runs = iterations.RUNS
    assert len(grams) == (len(runs) if composed and shape != (30, 45) else sum(runs))


SPECTRA = {
    "level": lambda n: torch.ones(n),
    "six decades": lambda n: torch.logspace(0, -6, n),
    "one far above": lambda n: torch.tensor([1.0] + [1e-5] * (n - 1)),
    "zero": torch.zeros,
}


def with_spectrum(spectrum: str, n: int, m: int) -> torch.Tensor:
    """Make a matrix (n, m) with these singular values."""
    rows, columns = (
        torch.linalg.qr(gradient("cpu", seed, (size, n)))[0] for seed, size in enumerate((n, m))
    )
    return rows * SPECTRA[spectrum](n) @ columns.T


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_no_spectrum_is_too_uneven_for_inverses(spectrum):
    polar = approximate_polar(with_spectrum(spectrum, 96, 160))
    assert torch.linalg.matrix_norm(polar, 2) < 1.2


@pytest.mark.parametrize(
    ("spectrum", "transposed"),
    [(spectrum, number % 2 == 0) for number, spectrum in enumerate(SPECTRA)],
)
def test_composed_steps_in_bf16_lose_no_more_than_single_steps(
    spectrum, transposed, device, monkeypatch
):
    """Without a restart, small singular values grow beyond all bounds."""
    grad = with_spectrum(spectrum, 96, 288).bfloat16().to(device)
    grad = grad.mT if transposed else grad
    errors, expected = {}, iterated(grad)
    for least in (0, 2**62):
        set_least_products(monkeypatch, least)
        polar = newton_schulz(grad, torch.bfloat16).double()
        assert polar.isfinite().all()
        assert torch.linalg.matrix_norm(polar, 2) < 1.3
        errors[least] = (polar - expected).norm() / expected.norm().clamp(min=1)
    assert errors[0] <= 1.1 * errors[2**62] + 0.01


@pytest.mark.parametrize("factor", [25.4, 25.4 / 3, 1.1667, 25.4 * 57 / 60, 1023.9 / 2**9, 0.0])
def test_gain_of_a_blend_has_ten_bits(factor):
    gain, shift = map(int, blend_gains(np.array(factor)))
    assert 0 <= gain < 2**10
    assert gain / 2**shift == pytest.approx(factor, rel=1 / 1000)


@pytest.mark.parametrize("rule", ["moment", "nibble"])
def test_boost_is_the_square_of_what_a_moment_lacks(rule, device):
    """Within 1 and 4, for 16 gradients of which nothing but their share would remain."""
    (untrained, _), (tensor, _) = (build(rule, "sign", device, (rows, 123)) for rows in (4, 33))
    updater = updater_of(untrained, tensor)
    for step in range(6):
        for micro in range(16):
            updater.begin(step, 0.0, micro, 16)
            if micro == 0:
                digits = tensor.rule.digits(state_of(tensor))["moment"][0].double()
                ratio = tensor.rule.expected_square / max(1e-9, digits.square().mean().item())
                wanted = min(max(ratio**2, 1), 4)
                boosts = [boost / 256 for boost in updater.controls.boosts.factors.tolist()]
                assert boosts == pytest.approx([4, wanted], abs=0.03)
            updater(tensor, gradient(device, 16 * step + micro))
    assert 1.1 < wanted < 3.9


def test_moment_decays_before_a_late_gradient_and_weights_step_after_it():
    """The late one has no share of the step."""
    tensor, _ = build("moment", "sign", "cpu")
    updater = ModuleUpdater([tensor], seed=3, dtype=torch.float32)
    updater.begin(0, 1.0)
    updater(tensor, gradient("cpu"))
    moment_before, z = tensor.moment.float(), z_of(tensor)
    updater.set_step(1, 1.0, 2, (1, 0))
    for micro in range(2):
        updater.begin_micro(micro)
    with pytest.raises(RuntimeError, match="interrupted"), updater.late():
        raise RuntimeError("interrupted")
    assert (updater.controls.first, updater.controls.last) == (False, True)
    with updater.late():
        updater(tensor, gradient("cpu", 1))
    assert torch.equal(z_of(tensor), z)
    assert (tensor.moment - 0.9 * moment_before).abs().max() < 1
    updater(tensor, gradient("cpu", 1))
    assert not torch.equal(z_of(tensor), z)


@pytest.mark.parametrize("counts", [(57, 3), (0, 60)], ids=str)
@pytest.mark.parametrize("kind", ["whole", "stack"])
@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
def test_micro_batches_weigh_by_their_counts(rule, kind, counts, monkeypatch):
    """Gradients of opposite signs: what is left is the difference of the shares.

    A moment of zero takes gradients with the largest boost.
    """
    if kind == "stack":
        tensor, updater = stack_of(rule, "sign")
        where = (range(EXPERTS),)
    else:
        (tensor, updater), where = build(rule, "sign", "cpu", (EXPERTS * HEIGHT, DIM)), ()
    tensor.exponent.zero_()
    tensor.fraction.fill_(64)
    sizes = []
    step = moment.step_by_moment
    monkeypatch.setattr(moment, "step_by_moment", lambda *x: (sizes.append(int(x[5])), step(*x)))
    digits = tensor.rule.digits(state_of(tensor))
    if "moment" in digits:
        held = tensor.remainder if rule == "nibble" else tensor.moment
        held.bitwise_and_(15) if rule == "nibble" else held.zero_()
    before = z_of(tensor) if rule == "carry" else None
    updater.set_step(0, 1.0, 2, counts)
    for micro, sign in enumerate((1, -1)):
        updater.begin_micro(micro)
        grad = sign * torch.ones(EXPERTS, HEIGHT, DIM)
        updater(tensor, grad if where else grad.flatten(0, 1), *where)
    shares = [count / sum(counts) for count in counts]
    if rule == "carry":  # z steps by a share of the direction with each gradient
        free = before.abs() < 25
        moved = (before - z_of(tensor))[free].float().mean()
        assert moved.item() == pytest.approx(32 / 16 * (shares[0] - shares[1]), abs=0.1)
    elif kind == "whole":
        units = tensor.rule.blend_units
        moment_digits = tensor.rule.digits(state_of(tensor))["moment"][0].float().mean()
        wanted = units * (shares[0] - shares[1]) / sum(share**2 for share in shares) ** 0.5
        assert moment_digits.item() == pytest.approx(wanted, abs=0.12)
        assert len(sizes) == 1
    else:  # a step of its own for each gradient, as long as its share
        whole = sum(sizes[::EXPERTS]) if len(sizes) > 2 else sum(sizes)
        assert sizes[0] / whole == pytest.approx(shares[0], abs=1e-6)


DIM = 33
ROWS = torch.tensor([2, 5, 11, 12, 30, 39])
"""Of a table of 40, each named by some slots."""


def table_of(rule: str, direction: str | None):
    return begun(TableWeight(40, DIM, spec_of(rule, direction), area="sequencer"))


def touched(slots_of_a_row: int) -> TouchedRows:
    return touched_rows(ROWS.repeat(slots_of_a_row), 40)


def padded(grad: torch.Tensor, where: TouchedRows) -> torch.Tensor:
    rows = torch.zeros(len(where.rows), DIM)
    rows[: len(grad)] = grad
    return rows


def mismatch(table: TernaryTensor, compact: TernaryTensor) -> dict[str, float]:
    """Find the share of bytes in which rows of a table differ from a compact matrix of them."""
    return {
        name: (
            (getattr(table, name)[slice(None) if name == "column_statistic" else ROWS] != buffer)
            .float().mean().item()
        )
        for name, buffer in compact.named_buffers()
    }  # fmt: skip


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize(("rule", "direction"), COMBINATIONS)
def test_rows_of_a_table_step_as_a_matrix_of_them(rule, direction, slots, monkeypatch):
    """Exactly so, if all rows are real, but for the iterations of Newton-Schulz.

    Else what is multiplied by the share differs in its last bit, and so a few random roundings.
    """
    monkeypatch.setattr(step_parameters, "STEP_CLIP", ROW_CLIP)
    table, updater = table_of(rule, direction)
    compact = matrix(len(ROWS), DIM, spec_of(rule, direction))
    for name, buffer in compact.named_buffers():
        of_all = getattr(table, name)
        buffer.copy_(of_all if name == "column_statistic" else of_all[ROWS])
    alone = updater_of(compact)
    where = touched(slots)
    assert len(where.rows) == min(40, slots * len(ROWS))
    for step in range(2):
        grad = gradient("cpu", step, (len(ROWS), DIM))
        updater.begin(step, lr=1.0)
        updater(table, padded(grad, where), where)
        alone.begin(step, lr=1.0)
        alone(compact, grad)
    exact = slots == 1 and direction != "orthogonal"
    assert max(mismatch(table, compact).values()) <= (0 if exact else 0.02)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rule", ["moment", "carry"])
def test_most_read_row_steps_no_further(rule, accumulation):
    table, updater = table_of(rule, "orthogonal")
    where, grad = touched(2), gradient("cpu", 0, (len(ROWS), DIM))
    grad[1] *= 1000

    def z() -> torch.Tensor:
        return table.weight(torch.float32).sign() * table.rule.radix + table.remainder

    before = z()
    for micro in range(accumulation):
        updater.begin(0, 1.0, micro, accumulation)
        updater(table, padded(grad, where), where)
    farthest = ROW_CLIP * STEP_OF_RADIX * table.rule.radix
    moved = (z() - before).abs().max()
    assert 0 < moved <= farthest + accumulation  # rounded stochastically


EXPERTS, HEIGHT = 3, 14


def stack_of(rule: str, direction: str | None):
    return begun(matrix(EXPERTS * HEIGHT, DIM, spec_of(rule, direction), matrices=EXPERTS))


@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
def test_single_row_of_a_stack_steps_as_far_in_several_micro_batches(rule):
    """Its direction is 8 RMS values of the matrix, and its step is limited to 4."""
    rows, moved = 64, []
    grad = torch.zeros(1, rows, DIM)
    grad[0, 5] = 1.0
    for accumulation in (1, 2, 4):
        stack = matrix(2 * rows, DIM, spec_of(rule, "factored"), matrices=2)
        stack.fill(0)
        updater = updater_of(stack)
        for micro in range(accumulation):
            updater.begin(0, 1.0, micro, accumulation)
            updater(stack, grad, range(1))
        low = stack.rule.digits(state_of(stack))["remainder"][0]
        z = unpack_trits(stack.trits, DIM) * stack.rule.radix + low
        moved.append(-z[5].float().mean() / (stack.rule.radix * STEP_OF_RADIX))
    assert moved == pytest.approx([4.0] * 3, rel=0.1)


@pytest.mark.parametrize("kind", ["stack", "head"])
@pytest.mark.parametrize(("rule", "direction"), COMBINATIONS)
def test_matrices_of_a_tensor_step_as_separate_ones(rule, direction, kind, device, monkeypatch):
    """Experts, and chunks of a head, which have two gradients in a step.

    One has no gradient in the second step; products of a stack may round differently.
    """
    monkeypatch.setattr(symbols, "MAX_CHUNK", 64)
    spec, is_stack = spec_of(rule, direction), kind == "stack"
    device, micros = (torch.device("cpu"), 1) if is_stack else (device, 2)
    heights = [HEIGHT] * EXPERTS if is_stack else [64, 64, 22]
    with torch.device(device):
        tensor = (
            stack_of(rule, direction)[0] if is_stack else SymbolWeight(150, DIM, spec, area="head")
        )
        about = {"area": tensor.area, "lr_factor": tensor.lr_factor}
        separate = [TernaryTensor(height, DIM, spec, **about) for height in heights]
    tensor.initialise(seed=0, index=0)
    for index, alone in enumerate(separate):
        for name, part in tensor.matrix(index).items():
            getattr(alone, name).copy_(part)
    ranges = [range(2), range(2, 3)] if is_stack else [*tensor.gradient_ranges()]
    together, apart = updater_of(tensor), updater_of(*separate)
    for step in range(3):
        before = {name: part.clone() for name, part in tensor.matrix(1).items()}
        together.set_step(step, 1.0, micros)
        apart.set_step(step, 1.0, micros)
        for micro in range(micros):
            grad = gradient(device, micros * step + micro, (sum(heights), DIM))
            parts = grad.split(heights)
            parts[1].mul_(step != 1)
            together.begin_micro(micro)
            apart.begin_micro(micro)
            for some in ranges:
                together(tensor, grad[tensor.rows_of(some)].view(len(some), -1, DIM), some)
            for alone, part in zip(separate, parts, strict=True):
                apart(alone, part)
        if step == 1 and is_stack:
            assert_same(dict(tensor.matrix(1)), before)
    # an expert that no byte chose is nothing to count
    assert together.counters()["refused"] == (0 if is_stack else 2)
    assert apart.counters()["refused"] == micros
    is_exact = not is_stack or direction != "orthogonal"
    assert int(together.flips) == int(apart.flips) > 0 or not is_exact
    for index, alone in enumerate(separate):
        for name, buffer in alone.named_buffers():
            differing = (tensor.matrix(index)[name] != buffer).float().mean()
            assert differing <= (0 if is_exact else 0.005), name


def test_scales_without_a_slope_stay():
    stack, updater = stack_of("moment", "sign")
    grads, before = gradient("cpu", 3, (EXPERTS, HEIGHT, DIM)), state_of(stack)
    updater.begin(0, lr=1.0)
    with updater.finding_slopes(frozenset({stack.area})):
        updater(stack, grads[:2], range(2))
    updater(stack, grads, range(EXPERTS))
    moved = (stack.fraction != before["fraction"]).any(dim=1).view(EXPERTS, HEIGHT)
    assert moved.any(dim=1).tolist() == [True, True, False]


def test_slopes_of_signs_step_scales():
    tensor, updater = build("votes", None, "cpu")
    generator = torch.Generator().manual_seed(0)
    grad_y, x = (torch.randn(64, width, generator=generator) for width in (33, 123))
    signs = sign_gradient(grad_y, x, tensor.packed)
    updater.begin(0, lr=1.0)
    with updater.finding_slopes(frozenset({tensor.area})):
        updater(tensor, signs)
    updater(tensor, signs)
    assert tensor.scale_votes.any()


SHAPES = ((5, 33), (4, 40), (5, 33))
SEVERAL = "moment nibble carry"
"""A rule for each of `SHAPES`."""


@pytest.mark.parametrize(
    ("rule", "direction", "digits"),
    [("moment", "factored", "trit"), ("votes", None, "trit"), (SEVERAL, "orthogonal", "all")],
)
def test_gradients_that_are_held_give_the_same_bits(rule, direction, digits, device):
    """Of every rule, `votes` too, which waits for nothing, and in two micro-batches of a step."""
    states = []
    for held_bytes in (0, 2**20):
        with use_backend(KERNELS):
            rules = zip(itertools.cycle(rule.split()), SHAPES, strict=False)
            built = [build(name, direction, device, shape, digits) for name, shape in rules]
            tensors = [tensor for tensor, _ in built]
            updater = Updater(tensors, 3, torch.float32, held_bytes)
            updater.set_step(0, 1.0, accumulation=2)
            for micro in range(2):
                updater.begin_micro(micro)
                for index, (tensor, shape) in enumerate(zip(tensors, SHAPES, strict=True)):
                    scale = torch.nan if index == 1 else 1.0  # both of a step are refused
                    updater(tensor, gradient(device, index + 3 * micro, shape) * scale)
            updater.finish()
            states.append([state_of(tensor) for tensor in tensors])
            assert updater.counters() == {"nonfinite_steps": 1, "refused": 2}
    for one, other in zip(*states, strict=True):
        assert_same(one, other)


def test_small_matrices_of_a_stack_step_together_with_the_same_bits(device, monkeypatch):
    """A bad gradient of one of them too. Large matrices, as by the last size, step one by one."""
    states, merged = [], []
    run = merged_launches.merge_launches
    monkeypatch.setattr(merged_launches, "merge_launches", lambda *x: (merged.append(0), run(*x)))
    for held_bytes, large in ((0, HEIGHT * DIM), (2**20, 2**22), (2**20, HEIGHT * DIM)):
        monkeypatch.setattr(update, "LARGE_ELEMENTS", large)
        with use_backend(KERNELS):
            with torch.device(device):
                stack, _ = stack_of("moment", "factored")
            updater = Updater([stack], 3, torch.float32, held_bytes)
            merged.clear()
            updater.begin(0, lr=1.0)
            grad = gradient(device, 0, (EXPERTS, HEIGHT, DIM))
            grad[1, 2, 3] = torch.nan
            for where in (range(2), range(2, 3)):
                updater(stack, grad[where.start : where.stop], where)
            updater.finish()
            states.append(state_of(stack) | {"counters": updater.counters()})
            assert bool(merged) == (held_bytes > 0 and large == 2**22 and stack.rule.merges)
    for other in states[1:]:
        for name, value in states[0].items():
            assert value == other[name] if name == "counters" else torch.equal(value, other[name])


def test_held_gradients_step_when_their_memory_is_full_and_are_dropped_by_another_step(device):
    with use_backend(KERNELS):
        built = [build("moment", "factored", device, (4, 40)) for _ in range(3)]
        tensors = [tensor for tensor, _ in built]
        updater = Updater(tensors, 3, torch.float32, 2 * 4 * 40 * 4)
        updater.begin(0, lr=1.0)
        before = [state_of(tensor) for tensor in tensors]
        for index, tensor in enumerate(tensors):
            updater(tensor, gradient(device, index, (4, 40)))
        updater.begin(1, lr=1.0)  # the first was aborted
        updater.finish()
    changed = [
        not torch.equal(tensor.remainder, old["remainder"])
        for tensor, old in zip(tensors, before, strict=True)
    ]
    assert changed == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_matrices_are_orthogonalised_as_each_alone(dtype, device):
    shapes = ((24, 40), (40, 24), (24, 40), (24, 24), (24, 40))
    grads = [gradient(device, index, shape) for index, shape in enumerate(shapes)]
    grads[1:] = [grad.bfloat16() for grad in grads[1:]]  # as of an embedding and of linear layers
    for grad, polar in zip(grads, orthogonalise_stacked(grads, dtype), strict=True):
        alone = newton_schulz(grad, dtype)
        assert polar.shape == grad.shape
        assert polar.dtype == dtype
        # the matrix library may choose another algorithm for a stack
        close = 1e-4 if dtype == torch.float32 else 0.1
        assert (polar - alone).float().norm() <= close


@pytest.mark.gpu
def test_shared_polynomials_have_the_bits_of_their_stacks(device, monkeypatch):
    shapes = ((768, 256), (256, 256), (1408, 256), (256, 704)) * 4
    grads = [gradient(device, index, shape).bfloat16() for index, shape in enumerate(shapes)]
    stacks = [orthogonalise_stacked(grads, torch.bfloat16)]
    monkeypatch.setattr(iterations, "shares_polynomial", lambda stack: False)
    stacks.append(orthogonalise_stacked(grads, torch.bfloat16))
    assert all(torch.equal(one, other) for one, other in zip(*stacks, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_orthogonalised_as_the_floats_that_they_equal(dtype, device):
    shapes = ((24, 40), (40, 24), (24, 40))
    moments = [(40 * gradient(device, i, shape)).to(torch.int8) for i, shape in enumerate(shapes)]
    squares = [moment.long().square().sum() for moment in moments]
    floats = [moment.to(dtype) for moment in moments]
    for of in (orthogonalise_stacked, orthogonal.DIRECTION.values_of):
        for polar, wanted in zip(of(moments, dtype, squares), of(floats, dtype), strict=True):
            close = 1e-5 if dtype == torch.float32 else 0  # norms that float32 sums in other orders
            torch.testing.assert_close(polar, wanted, rtol=0, atol=close)
            assert polar.is_contiguous()


@pytest.mark.parametrize("size", [2.0**-54, 2.0**50])
@pytest.mark.parametrize(("rule", "direction"), COMBINATIONS)
def test_update_does_not_depend_on_the_size_of_the_gradient(rule, direction, size, device):
    """Times a power of two, as long as the sum of squares is in range, nearly all is the same."""
    states = []
    for factor in (1.0, size):
        tensor, updater = build(rule, direction, device)
        updater.begin(0, lr=1.0)
        updater(tensor, gradient(device) * 1e3 * factor)
        assert updater.counters()["refused"] == 0
        states.append(state_of(tensor))
    for name in states[0]:
        if "statistic" not in name:
            differing = (states[0][name] != states[1][name]).float().mean()
            assert differing < 0.05, name
