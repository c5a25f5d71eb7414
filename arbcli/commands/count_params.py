"""`arb count-params`: weights and bytes of a model that need not exist."""

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from arbcli.base.output import emit, table
from arbcli.commands._options import Json, expand_model_file, given_options, takes_settings
from arbcli.commands._parts_table import parts_table
from arbcli.config.presets import assembled

if TYPE_CHECKING:
    from arbcli.inspect.memory import Footprint, StateReport


@takes_settings()
def count_params(as_json: Json = False, **settings: Any) -> None:
    """Count weights and bytes of a model without building it: `arb count-params --preset 1b`."""
    settings = expand_model_file(given_options(**settings))
    config = assembled(settings.pop("preset", "tiny"), **settings)
    from arbcli.inspect.memory import predict_parts  # imports torch, which takes seconds

    report = predict_parts(config)
    emit(report, Group(state_table(report), parts_table(report.parts)), as_json=as_json)


def state_table(report: "StateReport") -> Table:
    """Lay out the state by area and by kind, next to the state of AdamW."""
    config, total = report.config, report.total
    title = f"State: {config.scale_type}, {config.rule_text}, {config.direction or 'no'} direction"
    result = table(title, ["", "weights", "padding", "MB", "MiB", "B/weight"], [])

    def add(name: str, size: int, weights: int, counts: tuple[str, str] = ("", "")) -> None:
        row = [name, *counts, f"{size / 1e6:,.2f}", f"{size / 2**20:,.2f}", f"{size / weights:.3f}"]
        result.add_row(*map(Text, row))

    def add_part(name: str, part: "Footprint") -> None:
        add(name, part.state_bytes, part.weights, (f"{part.weights:,}", f"{part.padding_trits:,}"))

    for area, part in report.areas.items():
        add_part(area, part)
    result.add_section()
    for kind, size in total.bytes_by_kind.items():
        if size:
            add(kind, size, total.weights)
    result.add_section()
    add_part("state", total)
    add("AdamW", report.adamw_bytes, report.trained_weights, (f"{report.trained_weights:,}", ""))
    return result
