"""What Triton compiles for a launch is read off its arguments."""

from types import SimpleNamespace

import torch
from marks import needs_triton

from arbcli.verify.variants import Launch, variant_of


@needs_triton
def test_variant_is_as_triton_specialises_it():
    names = ("x_ptr", "part_ptr", "rows", "heads", "width", "plain", "SIZE")
    params = [SimpleNamespace(name=name, do_not_specialize=name == "plain") for name in names]
    function = SimpleNamespace(arg_names=names, params=params)
    x = torch.empty(64, device="meta")
    given = {"x_ptr": x, "part_ptr": x[2:], "rows": 48, "heads": 1, "width": 7, "plain": 32}
    launch = Launch(function, (1,), given, {"SIZE": 8}, {"num_warps": 4})
    _, signature, constants, multiples, options = variant_of(launch)
    assert constants == {"SIZE": 8, "heads": 1}
    assert signature == {
        "x_ptr": "*fp32", "part_ptr": "*fp32", "rows": "i32", "heads": "constexpr",
        "width": "i32", "plain": "i32", "SIZE": "constexpr",
    }  # fmt: skip
    assert multiples == [(0,), (2,)]
    assert options == {"num_warps": 4}
