"""Attention with a cache of keys and values, and the storage format of the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.base.lazy import imported
from arbcli.model.parts.base import Part

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Dtypes of codes, by the values of `--kv`."""


class CacheFormat(NamedTuple):
    """Format of keys and values in a cache."""

    code_dtype: torch.dtype | None = None
    """Dtype of codes, float8_e4m3fn or int8; None stores the dtype of activations."""
    mixed: bool = False
    """Whether the rotary elements of keys keep the dtype of activations."""
    queries: bool = False
    """Whether queries are rounded like keys; implies `mixed`."""

    @classmethod
    def parse(cls, value: str | None) -> "CacheFormat":
        """Parse a value of `--kv`: a name of `FORMATS`, with an optional suffix, or `bf16`."""
        code, _, suffix = (value or "").partition("-")
        return cls(FORMATS.get(code), bool(suffix), suffix == "queries")

    def name(self, plain: str) -> str:
        """Return the value of `--kv`, or `plain` if no eight-bit codes are stored."""
        codes = {dtype: code for code, dtype in FORMATS.items()}
        suffix = "-queries" if self.queries else "-mixed" if self.mixed else ""
        return plain if self.code_dtype is None else codes[self.code_dtype] + suffix

    def round(self, *parts: Tensor, rotated: int = 0) -> tuple[Tensor, ...]:
        """Round entries, (..., d), to their stored values; `rotated` elements are rotary."""
        if self.code_dtype is None:
            return parts
        rotated = rotated if self.mixed else 0
        round_entries = imported("arbcli.kernels.attention.eight_bits:round_entries")
        return tuple(round_entries(part, self.code_dtype, rotated) for part in parts)

    def round_queries(self, q: Tensor, rotated: int) -> Tensor:
        """Round queries, (..., d), if the format rounds them; `rotated` elements are rotary."""
        return self.round(q, rotated=rotated)[0] if self.queries else q


class CachedAttention(Part):
    """Attention with a state of keys and values."""

    cache_format = CacheFormat()
    """Storage format, to which a forward without a state rounds keys and values too."""
    rounds_queries = False
    """Whether queries can be quantised too."""
