"""Float64 references of the models of the tests."""

from torch import Tensor

from arbcli.model.language_model import LanguageModel
from arbcli.verify.reference import reference_model
from arbcli.verify.update_reference import reference_weight


def reference_logits(
    lm: LanguageModel, ids: Tensor, weights: dict[str, Tensor] | None = None, **options
) -> Tensor:
    """Compute logits of (B, T) bytes in float64; `weights` may be decoded ones by name."""
    if weights is None:
        weights = {name: reference_weight(tensor) for name, tensor in lm.weights().items()}
    else:
        names = lm.weights()
        weights = {next(n for n in (k, f"{k}.weight") if n in names): w for k, w in weights.items()}
    buffers = dict(lm.named_buffers())
    return reference_model(weights, lm.config, ids, memories=buffers, **options)[0]
