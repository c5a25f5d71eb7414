"""How the step of a weight depends on the width of its model, so that one learning rate fits all.

A step is relative: it moves z, and with it a weight, by a share of how far weights spread at the
start. What a product changes by should be the same share at every width (Yang et al.,
https://arxiv.org/abs/2203.03466; by norms, https://arxiv.org/abs/2310.17813):

| weight | direction | its learning rate is multiplied by |
|---|---|---|
| inside the model | orthogonal: singular values are alike | 1 |
| inside the model | factored, sign: elements are alike, and add up | sqrt(384 / width) |
| head, whose 256 outputs do not grow | any | sqrt(384 / width) / 4 |
| embedding, tables, gains and vectors | any | 1 |

384 is the width of `small`, where the rules' own learning rates were found, and where a quarter was
found for the head.
"""

import math

from arbcli.config.site import Site

REFERENCE_WIDTH = 384
HEAD = 0.25


def inner_lr_factor(site: Site, direction: str | None) -> float:
    """Choose what the learning rate of a matrix inside a model is multiplied by.

    Args:
        site: of the model, or of its stage.
        direction: of the steps; None where a rule takes none.
    """
    return _falling(site) if direction in ("factored", "sign") else 1.0


def head_lr_factor(site: Site) -> float:
    """Choose that of the matrix that gives logits."""
    return HEAD * _falling(site)


def _falling(site: Site) -> float:
    return math.sqrt(REFERENCE_WIDTH / site.dim)
