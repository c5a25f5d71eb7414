"""Parameters of sampling from logits."""

from dataclasses import dataclass

from arbcli.base.errors import ArbError
from arbcli.config.model import MAX_SIZE, VOCABULARY


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of sampling from logits."""

    temperature: float = 0.8
    """Sampling temperature; 0 is greedy."""
    top_k: int = VOCABULARY
    """Sample from the k likeliest symbols, or from all if there are fewer."""
    top_p: float = 1.0
    """Nucleus (top-p) sampling, applied after `top_k`."""
    seed: int = 0
    """Seed of the random numbers, which only depend on it and the position on any device."""

    def __post_init__(self) -> None:
        """Check the ranges of the parameters.

        Raises:
            ArbError: a parameter is out of range.
        """
        t = self.temperature
        for option, value, fits, hint in (
            ("temperature", t, t == 0 or 1e-6 <= t <= 1e6, "0, or 1e-6 to 1e6"),
            ("top-k", self.top_k, 1 <= self.top_k <= MAX_SIZE, f"1 to {MAX_SIZE:,}"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**31, f"0 to {2**31 - 1}"),
        ):
            if not fits:
                raise ArbError(f"`--{option}` is {value}", f"use {hint}")
