"""Random generator for the verification cases of operations.

A `CaseGenerator` also draws strides, offsets, dtypes and states. A plain one uses defaults for
these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import OCTAVE, Packed, num_groups
from arbcli.kernels.codec.packing import pack_trits_torch
from arbcli.kernels.runtime.arguments import Argument, Matrix, Number, evaluate, real_dtypes
from arbcli.kernels.runtime.texts import stacked_texts

SMALL_SIZES = (1, 2, 3, 5)
Sizes = tuple[int, int, int]
"""Rows of activations, outputs of a matrix, and its inputs."""


class CaseGenerator:
    """Random numbers and tensors of one case, from one seed.

    Args:
        seed: seed of all draws.
        device: device of the tensors.
        dtype: dtype of real values. None draws it, and allows tensors that are views of larger
            ones.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)  # of the numbers in tensors
        self._rolls = torch.Generator().manual_seed(seed)  # the same for tensors of any device
        self.device, self.plain = device, dtype is not None
        self.dtype = dtype or self.pick(real_dtypes(device))

    def integer(self, limit: int) -> int:
        """Draw an integer in 0..limit-1."""
        return int(torch.randint(limit, (), generator=self._rolls, device=self._rolls.device))

    def pick(self, choices: Sequence) -> Any:
        """Draw an element of a sequence."""
        return choices[self.integer(len(choices))]

    def size(self, boundaries: tuple[int, ...]) -> int:
        """Draw a size: small, or within one of a boundary."""
        if self.integer(5) == 0:
            return self.pick(SMALL_SIZES)
        return self.pick(boundaries) - 1 + self.integer(3)

    def sizes(
        self, rows: tuple[int, ...], tiles: tuple[int, ...], columns: tuple[int, ...]
    ) -> Sizes:
        """Draw m, n and k near boundaries, of which no two are tiny."""
        m, n, k = self.size(rows), self.size(tiles), self.size(columns)
        if m * n < 64 or n * k < 64:  # so few sums can cancel to any relative error
            return m + 16, n + 16, k + 5
        return m, n, k

    def chance(self, share: float) -> bool:
        """Return True with a given probability; never with a plain generator."""
        return not self.plain and self.integer(1000) < 1000 * share

    def seeded(self) -> torch.Generator:
        """Create a CPU generator with a newly drawn seed."""
        return torch.Generator().manual_seed(self.integer(2**31))

    def scalar(self, value: int) -> Tensor:
        """Create an int32 scalar tensor, such as a position or a threshold."""
        return torch.tensor(value, dtype=torch.int32, device=self.device)

    def real(self, value: float) -> Tensor:
        """Create a float32 scalar tensor."""
        return torch.tensor(value, device=self.device)

    def ok(self) -> Tensor:
        """Draw the `ok` flag of a step, an int32 scalar tensor; it is 0 in one case of ten."""
        return self.scalar(not self.chance(0.1))

    def key(self) -> Tensor:
        """Draw the key of a random stream, an int32 scalar tensor."""
        return self.scalar(self.integer(2**32) - 2**31)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        """Draw integers in low..high of a shape; in some cases all are equal."""
        if self.chance(0.15):
            value = self.pick((low, high, (low + high) // 2))
            return self.view(torch.full(shape, value, dtype=dtype, device=self.device))
        values = torch.randint(
            low, high + 1, shape, generator=self.generator, device=self.device, dtype=dtype
        )
        return self.view(values)

    def reals(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers of a shape, in the dtype of the case by default."""
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return self.view(values.to(dtype or self.dtype))

    def shares(self, *shape: int) -> Tensor:
        """Draw float32 numbers between 0 and 1, of a shape."""
        values = torch.rand(shape, generator=self.generator, device=self.device)
        return self.view(values.clamp(1e-4, 1 - 1e-4))

    def texts(self, inputs: tuple, index: int, *shared: int) -> tuple:
        """Make three texts of one in two of five cases, of which one is at its first position.

        Args:
            inputs: arguments for one text, the first of which differs between texts.
            index: index of the position.
            shared: as of `text_by_text`.
        """
        if not self.chance(0.4):
            return inputs
        position = torch.zeros_like(inputs[index])
        first = (-inputs[0], *inputs[1:index], position, *inputs[index + 1 :])
        return stacked_texts([inputs, first, inputs], *shared)

    def trits(self, rows: int, columns: int) -> Tensor:
        """Draw packed trits, (rows, row_bytes(columns)) uint8, padded with 0."""
        return self.view(pack_trits_torch(self.integers(-1, 1, rows, columns)))

    def packed(
        self, rows: int, columns: int, group_size: int, spread: int = 8, digits: str = "any"
    ) -> Packed:
        """Draw a packed matrix with E within `spread` of -1; one in ten has no F.

        In three of ten, weights are all digits, unless `digits` is `trit` or `all`.
        """
        trits, groups = self.trits(rows, columns), (rows, num_groups(columns, group_size))
        low, high = max(-96, -1 - spread), min(31, spread - 1)
        exponent = self.integers(low, high, *groups)
        fraction = None if self.chance(0.1) else self.integers(0, OCTAVE - 1, *groups)
        packed = Packed(trits, exponent, fraction, columns, group_size)
        if digits == "trit" or (digits == "any" and not self.chance(0.3)):
            return packed
        radix, nibble = self.pick(((64, False), (14, True)))
        remainder = self.integers(-128, 127, rows, columns)
        return packed._replace(remainder=remainder, radix=radix, nibble=nibble)

    def view(self, values: Tensor) -> Tensor:
        """Copy values of any shape to a view of a larger tensor with random strides and offset."""
        if values.dim() == 0 or not self.chance(0.5):
            return values
        steps = [1 + self.integer(3) for _ in values.shape]
        starts = [self.integer(3) for _ in values.shape]
        sizes = [z + s * n for z, s, n in zip(starts, steps, values.shape, strict=True)]
        flipped = values.dim() == 2 and self.chance(0.5)
        sizes = sizes[::-1] if flipped else sizes
        base = torch.empty(sizes, dtype=values.dtype, device=self.device)
        base = base.T if flipped else base
        corner = zip(starts, steps, values.shape, strict=True)
        view = base[tuple(slice(z, z + s * n, s) for z, s, n in corner)]
        return view.copy_(values)


def draw_argument(
    kind: Argument, values: Any, rng: CaseGenerator, group_size: int, sizes: Mapping[str, Any]
) -> Any:
    """Draw an argument.

    Args:
        kind: its declaration.
        values: of an array its smallest and largest number, or expressions of sizes, or a function
            of (generator, *shape); None draws normal numbers, or the full range of an integer
            dtype. Of a packed matrix keyword arguments of `CaseGenerator.packed`. Of a number its
            options, of which strings are expressions of sizes.
        rng: generator of the case.
        group_size: of packed matrices.
        sizes: sizes by name.
    """
    if isinstance(kind, Number):
        return rng.pick(kind.allowed) if kind.allowed else evaluate(rng.pick(values), sizes)
    if kind.optional and rng.chance(0.3):
        return None
    shape: list[int] = []
    for size in kind.dims:
        shape += sizes[size[1:]] if size.startswith("*") else [evaluate(size, sizes)]
    if isinstance(kind, Matrix):
        return rng.packed(shape[0], shape[1], group_size, **(values or {}))
    dtype = kind.dtypes[0]
    if dtype != torch.float32:
        dtype = rng.pick(kind.dtypes)
    if callable(values):
        drawn = values(rng, *shape)
    elif torch.bfloat16 in kind.dtypes:
        drawn = rng.reals(*shape)
    elif dtype == torch.float32:
        drawn = rng.reals(*shape, dtype=dtype)
    elif dtype == torch.bool:
        drawn = rng.view(rng.integers(0, 1, *shape).bool())
    else:
        limits = torch.iinfo(min(dtype, torch.int32, key=lambda kind: kind.itemsize))
        low, high = values or (limits.min, limits.max)
        low, high = evaluate(low, sizes), evaluate(high, sizes)
        drawn = rng.integers(low, high, *shape, dtype=dtype)
    return drawn.contiguous() if kind.dense is True else drawn
