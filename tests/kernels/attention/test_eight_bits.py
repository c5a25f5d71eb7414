"""Entries of a cache in eight bits: exact where they can be, and as close as was measured."""

import pytest
import torch

from arbcli.kernels.attention.decode_attention import decode_attention
from arbcli.kernels.attention.eight_bits import (
    FORMATS,
    quantise_entries,
    round_entries,
)
from arbcli.kernels.dice import Dice
from arbcli.kernels.registry import BY_NAME
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.kernels import compare, copies

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
def test_every_code_is_read_back_exactly(stored):
    """In bfloat16 too; and what was read back has the same codes again."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored).float()
    codes = codes[codes.isfinite() & (codes.abs() < (256 if stored != torch.int8 else 128))]
    for exponent in (-119, -1, 0, 100):
        x = codes * 2.0**exponent
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(round_entries(x.to(dtype), stored).float(), x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs no interpreter")
def test_kernel_keeps_a_number_just_below_a_power_of_two_within_a_byte():
    """It rounds to 128, and no random case has any."""
    spec = BY_NAME["append_position_8bit"]
    drawn = spec.drawn(Dice(0, torch.device("cpu"), torch.float32), 32, 5, 7, 37)
    inputs = dict(zip(spec.arguments, drawn, strict=False))  # the last are a pair
    assert inputs["recent"].dtype == torch.int8
    for name, value in (("new", 1), ("cos", 1), ("sin", 0)):
        inputs[name] = torch.full_like(inputs[name], value)
    inputs["eps"] = 1 / 0.998**2 - 1
    given = *inputs.values(), *drawn[len(inputs) :]
    wanted = spec.reference(*copies(given))
    with use_backend("interpreter"):
        got = spec.run("interpreter")(*copies(given))
    assert any((part == 127 / 128).any() for part in wanted)
    for one, other in zip(got, wanted, strict=True):
        assert compare(spec, "edge", one, other).passed


@pytest.mark.parametrize(("name", "bound"), [("fp8", 2**-4), ("int8", 2**-7)])
def test_error_is_within_half_a_step(name, bound):
    """e4m3 is off by a share of each number, integers by a share of the largest."""
    x = draw(50, 64) * torch.exp2(torch.arange(50.0) - 25)[:, None]
    error = (round_entries(x, FORMATS[name]) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    floor = largest * 2**-16 if name == "fp8" else largest
    assert (error <= bound * (torch.maximum(x.abs(), floor) if name == "fp8" else floor)).all()


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_so(bad, stored):
    x = draw(3, 8)
    x[1, 2] = bad
    found = round_entries(x, stored).isfinite()
    assert found[[0, 2]].all()
    assert not found[1].any()


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
def test_zeros_are_zeros(stored):
    assert not round_entries(torch.zeros(2, 4), stored).any()


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_entry_of_almost_nothing_has_the_least_exponent(backend, stored, device):
    """Scales end there: a row that is smaller has smaller codes."""
    qkv = torch.ones(3, 1, 4, device=device)
    qkv[2] *= 2.0**-125
    keys, values = torch.zeros(2, 1, 2, 4, device=device).to(stored)
    exponents = torch.zeros(2, 1, 2, dtype=torch.int8, device=device)
    angle = torch.zeros(2, 2, device=device)
    numbers = (torch.zeros(n, dtype=torch.int32, device=device) for n in ((), (1,)))
    position, semaphores = numbers
    about = position, angle.cos(), angle.sin(), semaphores, 1e-6
    with use_backend(backend):
        decode_attention(qkv, keys, values, *about, exponents=exponents)
    assert exponents[1, 0].tolist() == [-120, 0]
    assert values[0, 0].float().tolist() == [2.0 if stored != torch.int8 else 1.0] * 4


def inputs(device, stored, position: int) -> list:
    heads, window, width = 2, 70, 12
    rings = [quantise_entries(ring, stored) for ring in draw(2, heads, window, width)]
    (keys, values), exponents = zip(*rings, strict=True)
    angle = draw(300, width // 2)
    return [
        part.to(device)
        for part in (
            draw(3, heads, width), keys, values,
            torch.tensor(position, dtype=torch.int32), angle.cos(), angle.sin(),
            torch.zeros(heads, dtype=torch.int32), torch.stack(exponents),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
def test_only_the_bytes_in_the_window_matter(stored, backend, device):
    """Codes and exponents of slots that are not written yet, and of the one that is overwritten."""
    for position in (5, 70):
        results = []
        for rubbish in (0, 99):
            parts = inputs(device, stored, position)
            for ring in (*parts[1:3], parts[-1].movedim(0, -1)):
                slots = ring.view(torch.int8)
                slots[:, position % 70] = rubbish
                slots[:, position + 1 :] = rubbish
            with use_backend(backend):
                results.append(decode_attention(*parts[:-1], 1e-6, exponents=parts[-1]))
        assert torch.equal(*results)
