"""`votes`: the rule of the reference system, which does not learn; kept to demonstrate that.

The sign of each gradient is a vote; three votes change a trit by one and reset its counter. Fixes
that were proposed are optional:

- `threshold`: a trit needs seven votes at first, and three from step 100 on.
- `order`: the scales vote after the trits, by slopes at the new trits.
- `start`: counters of trits begin at -2 to 2 instead of 0.
- `bound`: a gradient changes at most 1 % of a matrix's trits, those with the most votes first.
- `scales`: no scale is stepped.
"""

import math
from collections.abc import Iterable

from torch import Tensor

from arbcli.families.votes.kernels.cast_votes import cast_scale_votes, cast_trit_votes
from arbcli.families.votes.kernels.hold_flips import hold_flips
from arbcli.kernels.update.gradient_statistics import gradient_statistics
from arbcli.model.rules.base import TRIT, Buffer, Gradient, Rule, State, StepControl

THRESHOLD = 3
"""Number of votes that change a trit."""
FIRST_THRESHOLD, STEPS_OF_THRESHOLD = 7, 25
"""Fix `threshold`: initial number of votes, and the steps after which it falls by one."""
FIRST_VOTES = 2
"""Fix `start`: largest initial number of votes of a trit."""
FLIP_SHARE = 0.01
"""Fix `bound`: maximum share of a matrix's trits that a gradient changes; at least one trit."""


class Votes(Rule):
    """An int8 counter of votes for each weight and each scale; scales are powers of two.

    Args:
        fixes: names of `arbcli.model.rules.VOTES_FIXES`.
    """

    name, radix, remainder_max = "votes", 32, 127
    has_fraction = False
    steps_by_signs = True
    merges = False

    def __init__(self, fixes: Iterable[str] = ()) -> None:
        self.fixes = frozenset(fixes)

    @property
    def reads_signs(self) -> bool:
        """Whether signs suffice: not with `order`, as slopes then depend on the new trits."""
        return "order" not in self.fixes

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare the votes of weights and scales."""
        return {
            "votes": Buffer((rows, columns), "votes"),
            "scale_votes": Buffer((rows, groups), "votes"),
        }

    def start(self, state: State, rows: slice, remainder: Tensor) -> None:
        """Derive the initial votes of the fix `start` from random remainders, (R, K) int8."""
        if "start" in self.fixes:
            state["votes"][rows] = remainder % (2 * FIRST_VOTES + 1) - FIRST_VOTES

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Return the votes of the weights, (N, K) int8, with their largest magnitude."""
        return {"votes": (state["votes"], 127 if "bound" in self.fixes else THRESHOLD)}

    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Cast the votes of scales, then of weights; with `order` in reverse."""
        if "order" not in self.fixes:
            self._vote_on_scales(state, gradient, gradient.statistics.slope)
        self._vote_on_trits(state, gradient, control)
        if "order" in self.fixes:
            after = gradient_statistics(
                gradient.values, gradient.packed, factored=False, signs=True
            )
            self._vote_on_scales(state, gradient, after.slope)

    def _vote_on_scales(self, state: State, gradient: Gradient, slope: Tensor) -> None:
        if "scales" in self.fixes:
            return
        cast_scale_votes(state["exponent"], state["scale_votes"], slope, gradient.gains.ok)

    def _vote_on_trits(self, state: State, gradient: Gradient, control: StepControl) -> None:
        ballot = state["trits"], state["votes"], gradient.values
        threshold, held = control.step.new_full((), THRESHOLD), None
        if "threshold" in self.fixes:
            fallen = control.step // STEPS_OF_THRESHOLD
            threshold = (FIRST_THRESHOLD - fallen).clamp_(min=THRESHOLD)
        if "bound" in self.fixes:
            max_flips = math.ceil(FLIP_SHARE * gradient.values.numel())
            held = hold_flips(*ballot, threshold, control.keys[TRIT], max_flips)
        control.flips.add_(cast_trit_votes(*ballot, gradient.gains.ok, threshold, held))


RULE = Votes()
