"""Time a training step of other families against plain PyTorch: chunks, long texts, experts.

    python -m benchmarks.families [FAMILY...] [--kinds KIND...] [--out DIR]

The bare baseline (`benchmarks.bare_families`) is compiled block by block, in bf16 with float32
weights, without sub-norms and clipping; its step is one CUDA graph, and its batch stays on the GPU.
`factored` is compared with AdamW, `orthogonal` with Muon. All kinds of a family take turns: see
`benchmarks.training_step`.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from arbcli.config.presets import preset
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.bare_families import Compressed, FamilyModel
from benchmarks.bare_twin import BareStep
from benchmarks.measuring import trainer_of
from benchmarks.training_step import Maker, measure, write_rows

FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "hnet-base": (8, {"preset": "hnet-base"}),
    "arb-long": (2, {"preset": "arb-long"}),
    "experts": (16, {"preset": "base", "experts": 16, "top_k_experts": 2, "ffn": 1024}),
}
"""Windows of a batch, and the model: `experts` is `base` with 16 experts, two for a byte."""
OURS: dict[str, dict[str, Any]] = {
    "factored": {"rule": "moment", "direction": "factored"},
    "orthogonal": {"rule": "moment", "direction": "orthogonal"},
}
BARE = ("AdamW, bare", "AdamW, bare, flex", "AdamW, bare, tuned", "Muon, bare")
TUNED = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "max_autotune_gemm_backends": "ATEN",
}
"""Options of `torch.compile` that try tiles of all kernels but products, which are cuBLAS's."""
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels of the bare baseline's causal attention, the fastest first."""


class FamilyStep(BareStep):
    """Trains a model whose causal attention takes the fastest kernel."""

    def _compute(self) -> None:
        with sdpa_kernel(ATTENTION, set_priority=True):
            super()._compute()


def build(family: str, kind: str) -> Trainer | BareStep:
    """Make what trains."""
    batch, model = FAMILIES[family]
    if kind in BARE:
        sizes = {key: value for key, value in model.items() if key != "preset"}
        bare_config = preset(model["preset"], weights="float", sub_norms=False, **sizes)
        flex = mock.patch.object(Compressed, "flex", kind.endswith("flex"))
        with torch.device("cuda"), flex:
            bare = FamilyModel(bare_config)
            ids = torch.randint(256, (batch, bare_config.ctx))
        matrices = bare.matrices if kind.startswith("Muon") else ()
        tuned = TUNED if kind.endswith("tuned") else None
        compiled = bare.compile_regions(dynamic=False, fullgraph=True, options=tuned)
        return FamilyStep(bare, ids, matrices, compiled)
    return trainer_of({"batch": batch} | model | OURS[kind])


def main() -> None:
    """Print a line a step, and write the rows of each family."""
    every = [*OURS, *BARE]
    parser = results.options("families", "Time training steps of families against plain PyTorch.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--kinds", nargs="+", choices=every, default=every)
    args = parser.parse_args()
    for family in args.families or FAMILIES:
        has_flex = family == "arb-long"  # only compressed attention differs
        kinds = [kind for kind in args.kinds if has_flex or not kind.endswith("flex")]
        makers = {kind: Maker(partial(build, family, kind), kind in BARE) for kind in kinds}
        batch, model = FAMILIES[family]
        shape = preset(model["preset"]).ctx, batch
        measure(family, shape, makers, partial(write_rows, "families", family, args.out))


if __name__ == "__main__":
    main()
