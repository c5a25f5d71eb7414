"""Ties among drawn scores are ties in every dtype, so that a choice is never left to a rounding."""

import pytest
import torch
from interpreter import barriers_where_needed

from arbcli.kernels.attention.choose_next import choose_next_, index_of_byte
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.compare import compare
from arbcli.verify.kernels import copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_choice_among_equal_scores_is_that_of_the_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (4, 32, 4097, 128, 4, 4096, 16383)  # the largest of those on a GPU
    inputs = index_of_byte(generator, torch.device("cpu"), dtype, *shape)
    wanted = choose_next_.reference(*copies(inputs))
    with use_backend("torch"):
        got = choose_next_.torch(*copies(inputs))
    for result, expected in zip(got, wanted, strict=True):
        found = compare(choose_next_, "", result, expected)
        assert found.unequal == 0, found


def test_drawn_scores_are_turned_and_normalised_by_different_numbers():
    generator = torch.Generator().manual_seed(0)
    query, _, _, _, _, cos, sin, *_ = index_of_byte(
        generator, torch.device("cpu"), torch.float32, 8, 6, 5, 2, 4, 4, 19
    )
    assert query[:48].view(8, 6).square().mean(dim=1).unique().tolist() == [1, 13]
    assert (cos.square() + sin.square() == 1).all()
    assert 0 < cos.abs().mean() < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="barriers are told by the interpreter alone")
def test_threads_wait_for_the_new_key_and_for_all_scores():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 4, 9, 4, 4, 8, 31)  # whose byte completes an entry
    inputs = index_of_byte(generator, torch.device("cpu"), torch.float32, *shape)
    with use_backend("interpreter"), barriers_where_needed():
        choose_next_.triton(*inputs)
