"""Decode several packed matrices of trits in one launch: `decode_weight`, merged.

A small matrix is decoded in less time than a launch takes. `runtime/merged.py` runs the programs of
all matrices as one launch, with the bits of single launches.
"""

from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.merged import merge_launches


def decode_weights_triton(
    matrices: list[Packed], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Decode several matrices of trits: one launch for those whose layouts are alike."""
    decoded: list[Tensor] = []
    runs = [partial(lambda m: decoded.append(decode_weight_triton(m, dtype)), m) for m in matrices]
    merge_launches(runs, matrices[0].trits.device)
    return decoded
