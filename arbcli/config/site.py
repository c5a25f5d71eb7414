"""Where a part of a model stands: the stream that it reads, and how its weights are stored."""

from dataclasses import dataclass

SCALE_TYPES = {f"T{size}": size for size in (4, 6, 8, 16, 32, 64, 96, 128)}
"""Scale type to group size: the number of weights of a row that share one scale."""
NORM_EPS = 1e-6
"""Added to a mean of squares before its root is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The surroundings of a part; layers read how they are stored from it."""

    dim: int
    """Width of the stream."""
    depth: int
    """Number of blocks in its list; output projections start smaller the more there are."""
    ctx: int
    """Positions of a window, at most."""
    scale_type: str = "T32"
    rule: str = "moment"
    digits: str = "trit"
    votes_fixes: tuple[str, ...] = ()
    direction: str | None = "orthogonal"
    weights: str = "ternary"
    norm_gain: bool = False
    """Whether norms before parts have gains that are trained."""
    norm_eps: float = NORM_EPS
    """Of these norms, and of those of queries and keys with gains."""
    causal: bool = True
    """Whether a position sees those before it alone; else it sees those after it, too."""

    @property
    def group_size(self) -> int:
        """Number of weights that share a scale."""
        return SCALE_TYPES[self.scale_type]
