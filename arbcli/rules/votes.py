"""`votes`: the rule of the reference system, which does not learn; kept so that it can be shown.

Each gradient votes by its sign; three votes flip a trit by one, and the votes begin anew.
"""

from torch import Tensor

from arbcli.kernels.update.cast_votes import TRIT_THRESHOLD, cast_scale_votes, cast_trit_votes
from arbcli.rules.base import Buffer, Gradient, Rule, State, StepControl


class Votes(Rule):
    """Votes of weights and of scales, a byte each; scales have whole octaves."""

    radix, remainder_max = 32, 127
    has_fraction = False
    steps_by_signs = True
    merges = False

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare both kinds of votes."""
        return {
            "votes": Buffer((rows, columns), "votes"),
            "scale_votes": Buffer((rows, groups), "votes"),
        }

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Read the votes of the weights."""
        return {"votes": (state["votes"], TRIT_THRESHOLD)}

    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Cast the votes of scales, then of weights."""
        ok = gradient.gains.ok
        cast_scale_votes(state["exponent"], state["scale_votes"], gradient.statistics.slope, ok)
        flips = cast_trit_votes(state["trits"], state["votes"], gradient.values, ok)
        control.flips.add_(flips)


RULE = Votes()
