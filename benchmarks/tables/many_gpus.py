"""Tables of `docs/many-gpus.md`."""

from benchmarks.tables.cells import measured, share
from benchmarks.tables.rows import Runs, Tables, only, row_of, rows_of


def bits_of_many(runs: Runs) -> str:
    """Compare states after the same steps on several GPUs and on one."""
    selection = only(runs, part="bits")
    lines = [
        [
            f"`{row['preset']}`, {row['kind']}",
            f"{row['gpus']}",
            f"{row['steps']}",
            f"{row['tensors'] - row['tensors_that_differ']} of {row['tensors']}",
            "yes" if row["losses_equal"] else "no",
            f"{row['wire_bytes_a_weight']:.3f}",
        ]
        for row in rows_of(selection)
    ]
    head = ["", "GPUs", "steps", "tensors equal to one GPU's", "losses equal"]
    return measured([*head, "bytes a step, weight and GPU"], lines, selection)


def speed_of_many(runs: Runs) -> str:
    """Time of a step where each GPU has one micro-batch, and what it is of linear."""
    selection, lines = only(runs, part="speed"), []
    for row in rows_of(selection):
        one = row_of(selection, preset=row["preset"], kind=row["kind"], gpus=1)
        linear = one["ms"] / row["ms"] if one and row["gpus"] > 1 else None
        lines.append(
            [
                f"`{row['preset']}`",
                row["kind"].replace("twin", "baseline") + ", captured" * row["captured"],
                f"{row['gpus']}",
                f"{row['ms']:.2f}",
                f"{row['bytes_per_second']:,.0f}",
                share(linear),
                f"{row['wire_bytes_a_weight']:.3f}" if row["wire_bytes_a_weight"] else "",
                f"{max(row['state_bytes']) / 1e9:.3f}",
                f"{max(row['peak_bytes']) / 1e9:.2f}",
            ]
        )
    head = ["preset", "kind", "GPUs", "ms a step", "trained bytes/s", "of linear"]
    head += ["bytes a step, weight and GPU", "state of a GPU, GB", "peak of a GPU, GB"]
    return measured(head, lines, selection)


TABLES: Tables = {
    "many-gpus-bits": ("many_gpus", bits_of_many),
    "many-gpus-speed": ("many_gpus", speed_of_many),
}
