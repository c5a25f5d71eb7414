"""Specification of a layer: the stream that it reads, and the storage of its weights."""

from dataclasses import dataclass, replace

from arbcli.model.rules import relative_lr

SCALE_TYPES = {f"T{size}": size for size in (4, 6, 8, 16, 32, 64, 96, 128)}
"""Group size by scale type: the number of weights of a row that share a scale."""
VOCABULARY = 256
"""Vocabulary size of models that read bytes."""
MAX_CHUNK = 4096
"""Maximum number of symbols in a chunk of a vocabulary; larger vocabularies are split."""
NORM_EPS = 1e-6
"""Default epsilon of norms, which is added to the mean square."""


def is_chunked(vocabulary: int) -> bool:
    """Return whether a vocabulary is split into chunks."""
    return vocabulary > MAX_CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Properties of the stage and the model that a part and its layers depend on."""

    dim: int
    """Width of the stream."""
    depth: int
    """Number of blocks in the list; output projections are initialised smaller in deeper lists."""
    ctx: int
    """Maximum number of positions in a window."""
    scale_type: str = "T32"
    rule: str = "moment"
    lr_rule: str | None = None
    """Rule that the learning rate of the run is meant for; None is `rule`."""
    digits: str = "trit"
    votes_fixes: tuple[str, ...] = ()
    direction: str | None = "orthogonal"
    weights: str = "ternary"
    norm_gain: bool = False
    """Whether norms before parts have trained gains."""
    norm_eps: float = NORM_EPS
    """Epsilon of these norms, and of norms of queries and keys with gains."""
    bitnet: bool = False
    """Whether no step changes the scales of matrices."""
    causal: bool = True
    """Whether a position only attends to earlier positions and itself."""

    @property
    def group_size(self) -> int:
        """Number of weights that share a scale."""
        return SCALE_TYPES[self.scale_type]

    def replace_rule(self, rule: str) -> "LayerSpec":
        """Return the spec with another rule, at the learning rate of the same run."""
        return replace(self, rule=rule, lr_rule=self.lr_rule or self.rule)

    @property
    def lr_factor(self) -> float:
        """Learning rate of the rule relative to that of the run: see `relative_lr`."""
        run_rule = self.lr_rule or self.rule
        return 1.0 if self.rule == run_rule else relative_lr(self.rule, run_rule, self.digits)
