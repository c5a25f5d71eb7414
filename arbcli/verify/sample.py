"""The sample of the checks of `--exhaustive` that runs by default, and is stated.

Kernels in Triton are sampled: compiling one for another group size takes seconds, and so does
interpreting one. On a CPU the torch and native backends run every case in every scale type. On a
GPU, where nothing runs in torch unless that is asked for, it has the scale types of Triton.
"""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from arbcli.config.site import SCALE_TYPES
from arbcli.verify.registry import KERNELS
from arbcli.verify.variants import Launch, Variant, recorded_launches, variant_of
from arbcli.verify.verification import Verification

DEFAULT_SCALE_TYPE = "T32"
"""The one in which each matrix of a model is multiplied in every way; in others in one each."""
ALWAYS = (DEFAULT_SCALE_TYPE, "T6")
"""Scale types of every sample: groups are planes of a block in one, and straddle all in the other.
Planted faults are looked for in these."""
IN_TRITON = ("triton", "interpreter")
"""Backends whose checks are sampled."""
OF_A_CASE = 0.25
"""Cost of a case without a compilation, relative to a compilation."""
OF_VALUES = {
    "unpack_trits", "int8_matmul", "grouped_matmul", "grouped_grad_w",
    "spread_chunks", "spread_chunks_backward", "mamba_step",
    "gradient_gains", "smooth_chunks_backward",
}  # fmt: skip
"""Kernels whose cases or launchers ask for numbers in tensors: their tensors have memory. The last
is drawn by thousands of operations, which take minutes without."""
LONG_CASES = {
    "decode_weight": ("2x1311", "9x1000"),
    "decode_e4m3": ("12x328*", "4x651*", "65x43", "2x651*digits*transposed", "E = 31"),
    "fp8_matmul": ("5x48x336 float32", "65x32x48 float32"),
    "prepacked_rows": ("2x180x8*", "2x20x2600*", "33x18x40*"),
    "grouped_matmul": ("299x65x136*transposed", "90x8x300*"),
    "grouped_grad_w": ("90x8x300*",),
    "rms_norm": ("1x8197",),
    "add_rms_norm": ("1x8197", "2x4096"),
    "rms_norm_backward": ("1x8197", "1x8197 added", "2x4096"),
    "gated_rms_norm": ("2x4096",),
    "gated_rms_norm_backward": ("1x8209", "2x4096"),
    "compressed_attention_backward": ("1x41 after 30*",),
    "attend_ahead": ("8 rows of 1x100x128*",),
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


TELLING = {
    "gradient_statistics": "3x333 all digits of 8 bits",
    "ternary_matmul": "33x17x165 float32",
    "ternary_matmul_grad_x": "33x17x165 float32",
    "expert_combine_backward": "9x8 of 300",
    "rms_norm": "5x1",
    "rms_norm_backward": "2x3x165 added",
    "decode_attention": "2x100x64 at 17",
    "attend_parts": "1x210x128 at 201 in 2 or fewer",
    "compressed_attention": "2x7 after 9, 2/1x4, all 4 entries of 4, last 5",
    "choose_byte": "some equal, (4.0, 6, 0.3)",
    "causal_conv_grad_w": "2x33x7, 4 taps",
}
"""Cases that a GPU runs by their labels: each finds a planted fault that others may not."""


def sampled_scale_types(spec: Verification, scale_types: Iterable[str]) -> tuple[str, ...]:
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


def kind_of(label: str) -> str:
    """Return a label without numbers and dtype, which describes the property of the case."""
    return re.sub(r"\d+", "0", label.removesuffix(" bf16"))


def is_long(kernel: str, label: str) -> bool:
    """Return whether the interpreter leaves a case of a kernel out of the sample."""
    return any(fnmatchcase(label, pattern) for pattern in LONG_CASES.get(kernel, ()))


class CompiledSample:
    """Chooses cases of a kernel such that a GPU compiles as few variants as possible.

    Together they meet each fact about what is compiled once: each type, each switch, each argument
    that is 1, is or is not a multiple of 16, each size of tiles up to a factor of 4, and all that a
    label says besides numbers; but not each combination. A fixed case for which nothing further is
    compiled runs too, and so does one real matrix of each order of magnitude.

    Args:
        spec: verification of the kernel.
    """

    def __init__(self, spec: Verification) -> None:
        self._telling = TELLING.get(spec.name)
        self._others = {other.triton.__module__ for other in KERNELS} - {spec.triton.__module__}
        self._offers: dict[tuple[Hashable, str], _Offer] = {}
        self._tried: set[tuple[Hashable, str]] = set()
        self.chosen: set[tuple[Hashable, str]] = set()
        """Cases that run: the part that has them, and their labels."""
        self.not_drawn = 0
        """Real matrices that `has` has turned down."""

    def may_take(self, part: Hashable, label: str) -> bool:
        """Return whether to draw a real matrix: none of its order of magnitude was drawn."""
        order = part, _order(label)
        worth = order not in self._tried
        self._tried.add(order)
        return worth

    def has(self, part: Hashable, label: str) -> bool:
        """Return whether a real matrix was chosen, in some type."""
        found = not {(part, label), (part, f"{label} bf16")}.isdisjoint(self.chosen)
        self.not_drawn += not found
        return found

    def offer(
        self, part: Hashable, label: str, run: Callable[[], object], *, fixed: bool = True
    ) -> None:
        """Record the properties and variants of a case.

        Args:
            part: has the case.
            label: label of the case.
            run: launches its kernels, which is recorded and not done.
            fixed: whether it is a fixed case, and no real matrix.
        """
        launches: dict[str, Launch] = {}
        variants: list[Variant] = []

        def record(launch: Launch) -> None:
            variants.append(variant_of(launch))
            launches[variants[-1].key] = launch

        facts: set[Hashable] = {kind_of(label) if fixed else part}
        if label == self._telling:
            facts.add((part, label))
        try:
            with recorded_launches(record):
                run()
        except Exception:  # a launcher that reads results, of which there are none
            facts.add((part, label))
        # kernels that others verify are compiled for them
        own = [v for v in variants if v.function.fn.__module__ not in self._others]
        facts |= {fact for variant in own or variants for fact in _facts(variant)}
        self._offers[part, label] = _Offer(facts, launches, None if fixed else _order(label))

    def choose(self) -> None:
        """Choose among the recorded cases, in descending order of new properties per cost."""
        missing = {fact for offer in self._offers.values() for fact in offer.facts}
        compiled: set[str] = set()
        while missing:
            place, offer = max(
                self._offers.items(),
                key=lambda each: (
                    len(each[1].facts & missing)
                    / (len(each[1].launches.keys() - compiled) + OF_A_CASE)
                ),
            )
            self.chosen.add(place)
            missing -= offer.facts
            compiled |= offer.launches.keys()
        orders = {self._offers[place].order for place in self.chosen}
        for place, offer in self._offers.items():
            if offer.launches.keys() <= compiled and (
                offer.order is None or offer.order not in orders
            ):
                self.chosen.add(place)
                orders.add(offer.order)

    def launches(self) -> list[Launch]:
        """Return a launch of each variant that the chosen cases compile."""
        found: dict[str, Launch] = {}
        for place in self.chosen:
            found |= self._offers[place].launches
        return [found[key] for key in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Offer:
    """A case that may run."""

    facts: set[Hashable]
    launches: dict[str, Launch]
    """Launches by the variant that is compiled for them."""
    order: str | None
    """Order of magnitude of a real matrix; None for other cases."""


def _order(label: str) -> str:
    """Write the sizes of a label as their numbers of digits."""
    return re.sub(r"\d+", lambda number: str(len(number[0])), label.removesuffix(" bf16"))


def _facts(variant: Variant) -> Iterable[Hashable]:
    """Return the properties of a variant, one by one."""
    name = variant.function.fn.__name__
    for key, kind in variant.signature.items():
        if kind != "constexpr":
            yield name, key, str(kind)
    for key, value in (variant.constants | variant.options).items():
        size = type(value) is int and value > 1
        yield name, str(key), f"size {value.bit_length() // 2}" if size else str(value)
    for place, key in enumerate(variant.signature):
        yield name, key, (place,) in variant.attributes
