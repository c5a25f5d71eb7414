"""Merged launches: the same bits as one launch after the other."""

import pytest
import torch
from marks import needs_triton

from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.launches import replaced_launches
from arbcli.kernels.runtime.merged import Launch, Tables, _tabulated, merge_launches
from arbcli.kernels.update.blend_moment import blend_moment
from arbcli.kernels.update.step_scales import step_scales


def copies(spec, device, only=lambda case: True):
    for _ in range(2):
        cases = [case.inputs for case in spec.cases(device, 32) if only(case)]
        yield [[x.clone() if torch.is_tensor(x) else x for x in inputs] for inputs in cases]


@pytest.mark.parametrize("spec", [step_scales, blend_moment], ids=lambda spec: spec.name)
def test_merged_launches_give_the_same_bits(spec, device):
    apart, together = copies(spec, device)
    with use_backend("triton" if device.type == "cuda" else "interpreter"):
        for inputs in apart:
            spec.triton(*inputs)
        merge_launches([lambda i=inputs: spec.triton(*i) for inputs in together], device)
    for one, other in zip(apart, together, strict=True):
        for x, y in zip(one, other, strict=True):
            if torch.is_tensor(x):
                assert torch.equal(x, y)


def test_equal_kernels_are_launched_once(device):
    launched = []
    (inputs, *_), _ = copies(step_scales, device)
    with replaced_launches(lambda kernel, grid, *_, **__: launched.append(grid)):
        parts = [lambda: step_scales.triton(*inputs)] * 7
        merge_launches(parts, device)
    assert [grid[1:] for grid in launched] == [(7,)]


def test_tables_of_captured_launches_have_a_room_of_their_own(device):
    tables = Tables()
    assert tables.bring([1, 2], device).tolist() == [1, 2]
    with tables.captured(5, device) as room:
        first, second = tables.bring([3, 4], device), tables.bring([5, 6, 7], device)
        assert not room.any()
        with pytest.raises(RuntimeError, match="more launches"):
            tables.bring([8], device)
        tables._numbers.pop()
    assert (first.tolist(), second.tolist()) == ([3, 4], [5, 6, 7])
    assert tables.brought == 8
    assert tables.bring([9], device).data_ptr() != room.data_ptr()
    with tables.captured(2, device) as again:  # of a step that is captured anew
        third = tables.bring([10, 11], device)
    assert (first.tolist(), third.tolist(), again.tolist()) == ([3, 4], [10, 11], [10, 11])


@needs_triton
@pytest.mark.parametrize("others", [(), (16,), (24,), (16, 24)])
def test_what_is_hinted_of_an_argument_is_true_of_all_launches(others, device):
    """A compiler loads words at once where 16 divides an address, or a stride."""
    buffer = torch.zeros(99, dtype=torch.uint8, device=device)
    numbers = (32, *others, 64)
    wave = [Launch(None, 1, (buffer[n:], n, 0.5), (), ()) for n in numbers]
    how = [kind for kind, *_ in _tabulated(wave).plan]
    wanted = ["pointer", "integer"] if 24 in others else ["aligned", "multiple"]
    assert how == [*wanted, "shared"]


def test_launches_on_other_dtypes_are_of_another_kind():
    kinds = {
        Launch("kernel", 1, (torch.zeros(2, dtype=dtype), 3), (), ()).kind
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    assert len(kinds) == 3
