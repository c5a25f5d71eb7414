"""The gated MLP."""

from torch import Tensor

from arbcli.config.parts.mlp import MLPConfig
from arbcli.verify.parts.base import Reading, Weights, gated, output_of


def mlp(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Transform the normalised stream h, (T, D)."""
    config = reading.config_of(MLPConfig)
    y = gated(h @ w["gate_up"].T)
    return output_of(y, w, normalise=config.sub_norm)
