"""`votes`: the rule of the reference system, which does not learn; kept so that it can be shown.

Each gradient votes by its sign; three votes flip a trit by one, and the votes begin anew. The fixes
that were proposed for it are switches:

- `threshold`: the votes that flip a trit are seven at first, and three from step 100 on.
- `order`: the scales vote after the trits, with slopes of the trits as they are then.
- `start`: the votes of trits are -2 to 2 at first, and not 0.
- `bound`: a gradient flips 1 % of the trits of a matrix at most, those of the most votes first.
"""

import math
from collections.abc import Iterable

from torch import Tensor

from arbcli.kernels.update.cast_votes import cast_scale_votes, cast_trit_votes
from arbcli.kernels.update.gradient_statistics import gradient_statistics
from arbcli.kernels.update.hold_flips import hold_flips
from arbcli.rules.base import TRIT, Buffer, Gradient, Rule, State, StepControl

THRESHOLD = 3
"""Votes that flip a trit."""
FIRST_THRESHOLD, STEPS_OF_THRESHOLD = 7, 25
"""With the fix `threshold`: the one of the first steps, and after how many it falls by one."""
FIRST_VOTES = 2
"""With the fix `start`: the most votes that a trit has at first."""
FLIP_SHARE = 0.01
"""With the fix `bound`: of the trits of a matrix, those that a gradient may flip; at least one."""


class Votes(Rule):
    """Votes of weights and of scales, a byte each; scales have whole octaves.

    Args:
        fixes: names of `arbcli.rules.VOTES_FIXES`.
    """

    radix, remainder_max = 32, 127
    has_fraction = False
    steps_by_signs = True
    merges = False

    def __init__(self, fixes: Iterable[str] = ()) -> None:
        self.fixes = frozenset(fixes)

    @property
    def reads_signs(self) -> bool:
        """Whether signs are enough: not where scales vote by the trits as they are afterwards."""
        return "order" not in self.fixes

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare both kinds of votes."""
        return {
            "votes": Buffer((rows, columns), "votes"),
            "scale_votes": Buffer((rows, groups), "votes"),
        }

    def start(self, state: State, rows: slice, remainder: Tensor) -> None:
        """Take the first votes, where there are any, from the remainders: they are as random."""
        if "start" in self.fixes:
            state["votes"][rows] = remainder % (2 * FIRST_VOTES + 1) - FIRST_VOTES

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Read the votes of the weights."""
        return {"votes": (state["votes"], 127 if "bound" in self.fixes else THRESHOLD)}

    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Cast the votes of scales, then of weights; or the other way round."""
        if "order" not in self.fixes:
            self._vote_on_scales(state, gradient, gradient.statistics.slope)
        self._vote_on_trits(state, gradient, control)
        if "order" in self.fixes:
            after = gradient_statistics(
                gradient.values, gradient.packed, factored=False, signs=True
            )
            self._vote_on_scales(state, gradient, after.slope)

    def _vote_on_scales(self, state: State, gradient: Gradient, slope: Tensor) -> None:
        cast_scale_votes(state["exponent"], state["scale_votes"], slope, gradient.gains.ok)

    def _vote_on_trits(self, state: State, gradient: Gradient, control: StepControl) -> None:
        ballot = state["trits"], state["votes"], gradient.values
        threshold, held = control.step.new_full((), THRESHOLD), None
        if "threshold" in self.fixes:
            fallen = control.step // STEPS_OF_THRESHOLD
            threshold = (FIRST_THRESHOLD - fallen).clamp_(min=THRESHOLD)
        if "bound" in self.fixes:
            most = math.ceil(FLIP_SHARE * gradient.values.numel())
            held = hold_flips(*ballot, threshold, control.keys[TRIT], most)
        control.flips.add_(cast_trit_votes(*ballot, gradient.gains.ok, threshold, held))


RULE = Votes()
