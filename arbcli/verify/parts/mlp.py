"""The gated MLP."""

from torch import Tensor

from arbcli.config.parts.mlp import MLPConfig
from arbcli.verify.parts.base import Reading, Weights, gated, norm


def mlp(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Transform the normalised stream h, (T, D)."""
    config = reading.config_of(MLPConfig)
    y = gated(h @ w["gate_up"].T)
    return (norm(y, w.get("sub_norm")) if config.sub_norm else y) @ w["output"].T
