"""Compressed attention: wide heads, choices, blocks, and what roundings to bf16 may be off by."""

from functools import partial

import pytest
import torch
from apparatus.interpreter import barriers_where_needed
from marks import needs_triton
from torch import Tensor

from arbcli.families.compressed.kernels.choose_entries import choose_entries
from arbcli.families.compressed.kernels.compressed_attention import Sight, tiling
from arbcli.families.compressed.verify.append_position import append_position_verification
from arbcli.families.compressed.verify.choose_next import choose_next_verification, index_of_byte
from arbcli.families.compressed.verify.compressed_attention import (
    compressed_attention_verification,
    random_sight,
)
from arbcli.families.compressed.verify.compressed_attention_backward import (
    compressed_attention_backward_verification,
    gradient_terms,
    rounded_attention_gradients,
)
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.check_kernels import copies
from arbcli.verify.compare import compare


def drawn(shape: tuple, length: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """Draw what the backward is given, of a text of one."""
    generator = torch.Generator().manual_seed(0)
    parts = random_sight(generator, Sight(5, 4, 99), 1, length, 0, shape)
    parts = [part.to(device) if isinstance(part, Tensor) else part for part in parts]
    inputs = (*(part.to(dtype) for part in parts[:3]), *parts[3:], 1e-6)
    grad = torch.randn(inputs[0].shape, generator=generator).to(device, dtype)
    y, logs, *_ = compressed_attention_verification.torch(*inputs)
    return grad, y, logs, *inputs


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_wide_heads_are_shared_among_programs(device):
    """The parts of a group add up: its shares, and what its entries are handed."""
    given = drawn((9, 1, 264, 2), 6, torch.float32, device)
    tile = tiling(given[3], given[4], given[6], given[10])
    assert (tile.rows, tile.parts) == (16, 4)
    for spec, inputs in (
        (compressed_attention_verification, given[3:]),
        (compressed_attention_backward_verification, given),
    ):
        for result, wanted in zip(spec.triton(*inputs), spec.torch(*inputs), strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("first", [1, 2, 18])
def test_last_entry_that_a_tile_of_groups_sees_is_scored(first, device, monkeypatch):
    """Each entry is better than those before it, so that every group takes its last one."""
    groups, entries = 19, 40
    q, w = torch.ones(1, groups, 1, 4, device=device), torch.ones(1, groups, 1, device=device)
    k = torch.arange(1.0, entries + 1, device=device)[None, :, None].expand(1, -1, 4).contiguous()
    # what is not written has no score
    empty = partial(torch.full, fill_value=-2)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(size, **how))
    with use_backend("triton" if device.type == "cuda" else "interpreter"):
        chosen = choose_entries(q, w, k, first, 99, 1)
    assert chosen[0, :, 0].tolist() == [*range(first - 1, first - 1 + groups)]


BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_not_filled_may_hold_no_numbers(backend, device):
    for case in append_position_verification.cases(device, 32):
        inputs = [*copies(case.inputs)]
        opened, position = inputs[3], inputs[5]
        texts = position.dim() > 0
        for slots, at in zip(opened if texts else opened[None], position.reshape(-1), strict=True):
            slots[:, int(at) % slots.shape[1] + 1 :] = torch.nan
        with use_backend(backend):
            wanted = append_position_verification.run(backend)(*copies(case.inputs))
            results = append_position_verification.run(backend)(*inputs)
        for got, expected in zip(results[:3], wanted[:3], strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_choice_among_equal_scores_is_that_of_the_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (4, 32, 4097, 128, 4, 4096, 16383)  # the largest of those on a GPU
    inputs = index_of_byte(generator, torch.device("cpu"), dtype, *shape)
    wanted = choose_next_verification.reference(*copies(inputs))
    with use_backend("torch"):
        got = choose_next_verification.torch(*copies(inputs))
    for result, expected in zip(got, wanted, strict=True):
        compared = compare(choose_next_verification, "", result, expected)
        assert compared.unequal == 0, compared


@pytest.mark.skipif(torch.cuda.is_available(), reason="barriers are told by the interpreter alone")
def test_threads_wait_for_the_new_key_and_for_all_scores():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 4, 9, 4, 4, 8, 31)  # whose byte completes an entry
    inputs = index_of_byte(generator, torch.device("cpu"), torch.float32, *shape)
    with use_backend("interpreter"), barriers_where_needed():
        choose_next_verification.triton(*inputs)


def test_gradient_of_a_sink_that_cancels_is_close_relative_to_its_terms():
    """That of one head and two bytes is what two numbers leave, each rounded to bfloat16."""
    spec = compressed_attention_backward_verification
    grad_y, *given = drawn((1, 1, 2, 0), 2, torch.bfloat16, torch.device("cpu"))
    first, second = gradient_terms(grad_y, *given)[-1].sum(dim=(0, 2, 3))
    grad_y[:, 1] *= -first / second
    inputs = grad_y, *given
    wanted, peer = spec.reference(*inputs)[-1], rounded_attention_gradients(*inputs)[-1]
    terms = gradient_terms(*inputs)[-1]
    assert (peer - wanted).norm() > spec.gate.peer_relative * wanted.norm()
    assert not compare(spec, "", peer, wanted, peer).passed
    assert compare(spec, "", peer, wanted, peer, terms).passed
    wrong = wanted + 0.02 * terms.norm()
    assert not compare(spec, "", wrong, wanted, peer, terms).passed
