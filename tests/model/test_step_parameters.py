"""The named fields of a row of a step's parameters."""

import pytest
import torch

from arbcli.model.step_parameters import GAINS, StepLayout


@pytest.mark.parametrize(("matrices", "paces"), [(1, 1), (3, 2), (7, 5)])
def test_fields_of_a_row_are_read_as_they_were_packed(matrices, paces):
    """An overlap of two fields, or a wrong place, would change one of them."""
    layout, generator = StepLayout(matrices, paces), torch.Generator().manual_seed(3)
    values = {
        name: torch.randint(0, 2**31, (2, 3, *shape), generator=generator)
        for name, (_, shape) in layout.fields.items()
    }
    rows = layout.pack(values, 2, 3)
    assert rows.shape == (2, 3, layout.width)
    for name, (dtype, _) in layout.fields.items():
        assert torch.equal(layout.view(rows, name), values[name].to(dtype)), name
    for pace, sizes in enumerate(layout.sizes(rows[1, 2])):
        for name, value in sizes._asdict().items():
            tensor = torch.stack(value) if name in GAINS else value
            assert torch.equal(tensor.long(), values[name][1, 2, pace]), name
