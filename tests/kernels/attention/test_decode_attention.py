"""One query against a ring, in floats and in eight bits: what the cases of the spec do not say."""

import pytest
import torch
from checked import assert_as_wanted

from arbcli.kernels.attention import decode_attention as module
from arbcli.kernels.attention.decode_attention import decode_attention
from arbcli.kernels.attention.eight_bits import round_entries
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.parts.cached import FORMATS
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import copies
from arbcli.verify.kernels.attention.decode_attention import (
    decode_attention_8bit_verification,
    decode_attention_verification,
)
from arbcli.verify.registry import BY_NAME

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
    drawn = spec.drawn(CaseGenerator(0, torch.device("cpu"), torch.float32), 32, 5, 7, 37)
    of_name = dict(zip(spec.arguments, drawn, strict=False))  # the last are a pair
    assert of_name["recent"].dtype == torch.int8
    for name, value in (("new", 1), ("cos", 1), ("sin", 0)):
        of_name[name] = torch.full_like(of_name[name], value)
    of_name["eps"] = 1 / 0.998**2 - 1
    given = *of_name.values(), *drawn[len(of_name) :]
    wanted = spec.reference(*copies(given))
    with use_backend("interpreter"):
        got = spec.run("interpreter")(*copies(given))
    assert any((part == 127 / 128).any() for part in wanted)
    assert_as_wanted(spec, "edge", got, wanted)


@pytest.mark.parametrize(("name", "bound"), [("fp8", 2**-4), ("int8", 2**-7)])
def test_error_is_within_half_a_step(name, bound):
    """e4m3 is off by a share of each number, integers by a share of the largest."""
    x = draw(50, 64) * torch.exp2(torch.arange(50.0) - 25)[:, None]
    error = (round_entries(x, FORMATS[name]) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    floor = largest * 2**-16 if name == "fp8" else largest
    assert (error <= bound * (torch.maximum(x.abs(), floor) if name == "fp8" else floor)).all()


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [-torch.inf, torch.nan], ids=str)
def test_non_finite_values_stay_non_finite(bad, stored):
    x = draw(3, 8)
    x[1, 2] = bad
    finite = round_entries(x, stored).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1].any()


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


@pytest.mark.parametrize(
    "spec",
    [decode_attention_verification, decode_attention_8bit_verification],
    ids=lambda s: s.name,
)
def test_program_attends_to_several_blocks_of_slots(spec, device, monkeypatch):
    """As in a ring of 16,384 slots; a program's blocks end before, at and after a slot.

    The sums of programs are added in several turns.
    """
    monkeypatch.setattr(module, "PROGRAMS", 8)
    monkeypatch.setattr(module, "SLOTS", 8)
    monkeypatch.setattr(module, "MAX_PARTS", 1)
    for case in [*spec.cases(torch.device("cpu"), 32)][::3]:
        given = [part.to(device) if torch.is_tensor(part) else part for part in case.inputs]
        wanted = spec.reference(*copies(given))
        with use_backend(BACKENDS[1]):
            got = spec.triton(*copies(given))
        assert_as_wanted(spec, case.label, got, wanted)


def test_tiles_of_a_text_do_not_depend_on_how_many_there_are(device, monkeypatch):
    """With few programs a head has fewer of them the more heads there are."""
    monkeypatch.setattr(module, "PROGRAMS", 8)
    drawn = draw(3, 2, 12), *draw(2, 2, 200, 12), draw(300, 6), draw(300, 6)
    qkv, keys, values, *table = (part.to(device) for part in drawn)
    outputs = []
    for texts in (2, 7):
        several = [
            torch.stack([part * (1 + text) for text in range(texts)])
            for part in (qkv, keys, values)
        ]
        position = torch.full((texts,), 180, dtype=torch.int32, device=device)
        semaphores = torch.zeros(texts, 2, dtype=torch.int32, device=device)
        with use_backend(BACKENDS[1]):
            y = decode_attention(*several, position, *table, semaphores, 1e-6)
        outputs.append(y[:2])
    assert torch.equal(*outputs)
