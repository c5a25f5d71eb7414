"""Choose what is checked by default, of all that `--exhaustive` checks: a sample that is stated.

Kernels in Triton are sampled: compiling one for another group size takes seconds, and so does
interpreting one. On a CPU the torch and native backends run every case in every scale type. On a
GPU, where nothing runs in torch unless that is asked for, it has the scale types of Triton.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from fnmatch import fnmatchcase

from arbcli.config.site import SCALE_TYPES
from arbcli.kernels.registry import KERNELS
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.variants import Launch, Variant, recorded_launches, variant_of

DEFAULT_SCALE_TYPE = "T32"
"""The one in which each matrix of a model is multiplied in every way; in others in one each."""
ALWAYS = (DEFAULT_SCALE_TYPE, "T6")
"""Scale types of every sample: groups are planes of a block in one, and straddle all in the other.
Planted faults are looked for in these."""
IN_TRITON = ("triton", "interpreter")
"""Backends whose checks are sampled."""
MOST_TRIED = 2
"""Real matrices of an order of magnitude that are drawn, until one of them runs."""
LONG_CASES = {
    "decode_weight": ("2x1311", "9x1000"),
    "decode_e4m3": ("12x328*", "4x651*", "65x43", "2x651*digits*transposed", "E = 31"),
    "fp8_matmul": ("5x48x336 float32", "65x32x48 float32"),
    "ternary_matmul": ("2x3x5480 * float32", "2x3x5480*zeros", "3x2x5280*", "9x17x805*"),
    "prepacked_rows": ("2x180x8*", "2x20x2600*", "33x18x40*"),
    "grouped_matmul": ("299x65x136*transposed", "90x8x300*"),
    "grouped_grad_w": ("90x8x300*",),
    "rms_norm": ("1x8197",),
    "add_rms_norm": ("1x8197", "2x4096"),
    "rms_norm_backward": ("1x8197", "1x8197 added", "2x4096"),
    "gated_rms_norm": ("2x4096",),
    "gated_rms_norm_backward": ("1x8209", "2x4096"),
    "compressed_attention_backward": ("1x41 after 30*",),
    "choose_entries": ("1x70*",),
    "weighted_rows": ("150x3*", "3x19*"),
    "weighted_rows_grad_weights": ("150x3*",),
    "unit_rows": ("2311x3",),
    "step_by_moment": ("33x165 nibble", "2x1311 moment", "2x1311 nibble", "2x1311 step*"),
    "step_by_direction": ("2x1311", "2x1311 rows only", "2x1311 saturated -1"),
    "cast_trit_votes": ("2x1311",),
    "take_last_bits": ("2x1311*",),
}
"""Labels of cases, or patterns of them, that the interpreter leaves out: each takes it about a
second, and other cases find every planted fault that they find."""


def sampled_scale_types(spec: Operation, scale_types: Iterable[str]) -> tuple[str, ...]:
    """Choose the scale types in which a kernel runs in Triton.

    They are `ALWAYS`, and one of each further path that the kernel declares, by turns of kernels.
    """
    scale_types = tuple(scale_types)
    chosen = [name for name in ALWAYS if name in scale_types]
    turn = KERNELS.index(spec) if spec in KERNELS else 0
    paths: dict[object, list[str]] = {}
    for name in scale_types:
        if name not in chosen:
            paths.setdefault(spec.scale_path(SCALE_TYPES[name]), []).append(name)
    taken = {spec.scale_path(SCALE_TYPES[name]) for name in chosen}
    further = [names for path, names in paths.items() if path not in taken]
    chosen += [names[turn % len(names)] for names in further]
    return tuple(name for name in scale_types if name in chosen)


def is_long(kernel: str, label: str) -> bool:
    """Tell whether the interpreter leaves a case of a kernel out of the sample."""
    return any(fnmatchcase(label, pattern) for pattern in LONG_CASES.get(kernel, ()))


class CompiledSample:
    """Chooses cases of a kernel by what a GPU would have to compile for them.

    A fixed case that compiles nothing new runs, and so does one real matrix of each order of
    magnitude. Others run if a fact about them is new: each type, each switch, each argument that is
    1, is or is not a multiple of 16, each size of tiles up to a factor of 4, and all that a label
    says besides numbers, in both types of `ALWAYS`, is met once, but not each combination.

    Args:
        spec: of the kernel.
    """

    def __init__(self, spec: Operation) -> None:
        self._others = {other.triton.__module__ for other in KERNELS} - {spec.triton.__module__}
        self._compiled: set[str] = set()
        self._facts: set[Hashable] = set()
        self._orders: set[str] = set()
        self._tried: Counter[str] = Counter()
        self.not_drawn = 0
        """Real matrices that `may_take` has turned down."""

    def may_take(self, label: str) -> bool:
        """Tell whether a real matrix is worth drawing: none of its order of magnitude has run."""
        order = _order(label)
        self._tried[order] += 1
        worth = order not in self._orders and self._tried[order] <= MOST_TRIED
        self.not_drawn += not worth
        return worth

    def takes(
        self, label: str, scale_type: str | None, run: Callable[[], object], *, fixed: bool = True
    ) -> bool:
        """Tell whether a case runs, and count it as run if so.

        Args:
            label: of the case.
            scale_type: of the case; None if it has none.
            run: launches its kernels, which is recorded and not done.
            fixed: whether it is a fixed case, and no real matrix.
        """
        variants: dict[str, Variant] = {}

        def record(launch: Launch) -> None:
            variant = variant_of(launch)
            variants[variant.key] = variant

        try:
            with recorded_launches(record):
                run()
        except Exception:  # a launcher that reads results, of which there are none
            return True
        # kernels that others verify are compiled for them
        own = [v for v in variants.values() if v.function.fn.__module__ not in self._others]
        facts = {fact for variant in own or variants.values() for fact in _facts(variant)}
        kind = label.removesuffix(" bf16")
        if scale_type is None or scale_type in ALWAYS:
            facts.add((re.sub(r"\d+", "0", kind), scale_type))
        order = _order(label)
        compiled = variants.keys() <= self._compiled
        if not facts <= self._facts or (compiled and (fixed or order not in self._orders)):
            self._compiled |= variants.keys()
            self._facts |= facts
            self._orders.add(order)
            return True
        return False


def _order(label: str) -> str:
    """Write the sizes of a label as their numbers of digits."""
    return re.sub(r"\d+", lambda number: str(len(number[0])), label.removesuffix(" bf16"))


def _facts(variant: Variant) -> Iterable[Hashable]:
    """List what a variant is compiled for, each thing for itself."""
    name = variant.function.fn.__name__
    for key, kind in variant.signature.items():
        if kind != "constexpr":
            yield name, key, str(kind)
    for key, value in (variant.constants | variant.options).items():
        size = type(value) is int and value > 1
        yield name, str(key), f"size {value.bit_length() // 2}" if size else str(value)
    for place, key in enumerate(variant.signature):
        yield name, key, (place,) in variant.attributes
