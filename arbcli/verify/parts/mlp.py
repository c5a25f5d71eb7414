"""The gated MLP."""

from torch import Tensor

from arbcli.config.parts.mlp import MLPConfig
from arbcli.verify.parts.base import Reading, Weights, gated, output_of, rounded


def mlp(w: Weights, _x: Tensor, h: Tensor, reading: Reading) -> Tensor:
    """Transform the normalised stream h, (T, D)."""
    config = reading.config_of(MLPConfig)
    if not config.bitnet:
        return output_of(gated(h @ w["gate_up"].T), w, normalise=config.sub_norm)
    gate, up = (rounded(h) @ w["gate_up"].T).chunk(2, dim=-1)
    return output_of(gate.relu() ** 2 * up, w, rounded_eps=reading.site.norm_eps)
