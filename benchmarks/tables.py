"""Write the tables of README.md and `docs/` from `docs/results/`.

    python -m benchmarks.tables [--take DIR]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and NAME is one of `TABLES`.
`--take` first adds the files of a folder, as a benchmark on another machine wrote them.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean, median, stdev
from textwrap import fill
from typing import Any

from benchmarks.fits import between, fit
from benchmarks.results import FOLDER, KEYS, add_runs, load

ROOT = FOLDER.parents[1]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PRESETS = ("tiny", "small", "base", "1b")
MIB = 2**20

Row = dict[str, Any]
Runs = list[dict[str, Any]]


def rows_of(runs: Runs, **fields: Any) -> list[Row]:
    """List the rows that have these values."""
    rows = (row for run in runs for row in run["rows"])
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def row_of(runs: Runs, **fields: Any) -> Row | None:
    """Return the row with these values; None if it was not measured."""
    found = rows_of(runs, **fields)
    return found[0] if found else None


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    first, *others = (
        "".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in [head, *rows]
    )
    return "".join([first, f"|{'---|' * len(head)}\n", *others])


def source(runs: Runs) -> str:
    """Return the origin of figures as a line: hardware, versions, commits and commands."""
    parts = []
    for fields, shown in (
        ("hardware", {"gpu": "", "driver": "driver ", "cuda": "CUDA ", "cpu": ""}),
        ("versions", {"python": "Python ", "torch": "torch ", "triton": "triton "}),
    ):
        for name, title in shown.items():
            values = {run[fields][name] for run in runs} - {None}
            parts += [f"{title}{value}" for value in sorted(values)]
    found = [f"`{run['commit']}`{' with changes' * run['dirty']}" for run in runs]
    names = dict.fromkeys(found)
    parts.append(f"commit{'s' * (len(names) > 1)} {', '.join(names)}")
    parts += dict.fromkeys(f"`{_program(run['command'])}`" for run in runs)
    return "\n" + fill(", ".join(parts) + ".", 100, break_on_hyphens=False) + "\n"


def _program(command: str) -> str:
    """Leave out which part of a benchmark was run."""
    return " ".join(command.split()[:3]) if command.startswith("python -m") else command


def speed_ratio(ours: Row | None, peer: Row | None) -> float | None:
    """Return our relative speed: the median over rounds in turns, or the ratio of medians."""
    if not ours or not peer:
        return None
    if ours.get("in_turns") and peer.get("in_turns"):
        pairs = zip(ours["rounds_ms"], peer["rounds_ms"], strict=True)
        return median(theirs / mine for mine, theirs in pairs)
    return peer["ms"] / ours["ms"]


def faster(runs: Runs, preset: str, twin: str) -> Row | None:
    """Return the fastest of the baselines: with sub-norms, without, and bare."""
    ways = ("", ", no sub-norms", ", bare")
    found = [row_of(runs, preset=preset, kind=f"{twin}{how}") for how in ways]
    return min((row for row in found if row), key=lambda row: row["ms"], default=None)


def _number(value: float | None, form: str = ",") -> str:
    return "" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}".replace("%", " %")


LEFT_TO_RESULTS = (
    "--no-sub-norms", "carry", "--lr 2e-3", "--weights ste --lr 3e-3", "--lr 0.35", "--lr 0.65",
)  # fmt: skip
"""Options that the short table leaves out: others of their kind do better, or as well."""


def quality(runs: Runs) -> str:
    """Loss by state, `small`, the best of each kind."""
    best = [run | {"rows": [row for row in run["rows"] if not _is_left_out(row)]} for run in runs]
    return _quality(best, "small", ("weights", "options", "held-out loss", "state"))


def _is_left_out(row: Row) -> bool:
    return any(part in row["options"] for part in LEFT_TO_RESULTS)


def quality_of_small(runs: Runs) -> str:
    """Loss by state, with commits, `small`."""
    return _quality(runs, "small", ("options", "held-out loss", "state", "commit"))


def quality_of_base(runs: Runs) -> str:
    """The same for `base`."""
    return _quality(runs, "base", ("options", "held-out loss", "state", "commit"))


def _quality(runs: Runs, preset: str, head: Sequence[str]) -> str:
    groups: dict[str, list[tuple[Row, str]]] = {}
    of_preset = [run for run in runs if rows_of([run], preset=preset)]
    for run in of_preset:
        for row in rows_of([run], preset=preset):
            if _is_of_today(row, preset):
                groups.setdefault(row["options"], []).append((row, run["commit"]))
    lines = []
    for options, found in groups.items():
        found.sort(key=lambda pair: pair[0]["seed"])
        rows = [row for row, _ in found]
        first, last = rows[0]["seed"], rows[-1]["seed"]
        seeds = f"{first} to {last}" if last - first > 1 else f"{first}, {last}"
        cells = {
            "weights": rows[0]["kind"],
            "options": f"`{options}`" + (f", seeds {seeds}" if len(rows) > 1 else ""),
            "held-out loss": ", ".join(f"{row['held_out_nats']:.4f}" for row in rows),
            "state": f"{rows[0]['state_mib']} MiB",
            "commit": ", ".join(dict.fromkeys(f"`{commit}`" for _, commit in found)),
        }
        lines.append([cells[name] for name in head])
    used = [run for run in of_preset if any(_is_of_today(row, preset) for row in run["rows"])]
    return markdown(head, lines) + source(used)


def steps_on_a_cpu(runs: Runs) -> str:
    """Milliseconds of a step of `tiny` on a CPU, and the baselines' speed as a share."""
    lines = []
    for compute in ("bf16", "fp32"):
        rows = {row["kind"]: row for row in rows_of(runs, preset="tiny", compute=compute)}
        twins = [rows[kind]["ms"] for kind in ("AdamW", "AdamW, compiled") if kind in rows]
        lines += [
            [kind, compute, f"{row['ms']:.0f} ms", *(f"{ms / row['ms']:.2f}" for ms in twins)]
            for kind, row in rows.items()
        ]
    head = ["", "compute", "a step", "the baseline being 1", "the compiled baseline being 1"]
    return markdown(head, lines) + source(runs)


def text_on_a_cpu(runs: Runs) -> str:
    """Bytes of text a second on a CPU, and of a prompt, against llama.cpp."""
    pairs: dict[tuple, dict[str, Row]] = {}
    for row in rows_of(runs):
        key = row["preset"], row["digits"], row["task"], row["threads"], row["level"]
        pairs.setdefault(key, {})[row["program"]] = row
    lines = []
    for (preset, digits, task, threads, level), found in sorted(pairs.items()):
        ours, peer = (found[name] for name in ("arb", "llama.cpp"))
        # with other programs a thread's time on the clock says little
        unit = "bytes_per_cpu_second" if threads == 1 else "bytes_per_second"
        rates = zip(*(row[f"rounds_{unit}"] for row in (ours, peer)), strict=True)
        speeds = [f"{row[unit]:,.1f} bytes/s" for row in (ours, peer)]
        ratio = median(mine / theirs for mine, theirs in rates)
        has = "AVX2" if level == "x86-64-v3" else "all"
        lines.append([f"`{preset}`, {digits}", task, str(threads), has, *speeds, f"{ratio:.2f}"])
    head = ["", "", "threads", "instructions", "`arb`", "llama.cpp", "ratio"]
    return markdown(head, lines) + source(runs)


EARLIER = " (until c5ecf49)"
"""A mark after the options of a run whose rule has changed since."""


def _is_of_today(row: Row, preset: str) -> bool:
    """Whether a row belongs in the tables of quality; `base` was not measured again."""
    return "fp8" not in row["options"] and (preset == "base" or EARLIER not in row["options"])


def quality_of_code(runs: Runs) -> str:
    """Loss by state on source code, `small`."""
    return _quality(runs, "small", ("weights", "options", "held-out loss", "state"))


def curves_of_code(runs: Runs) -> str:
    """Loss in the course of a run on source code, and state, `base`."""
    rows = rows_of(runs)
    marks = sorted({step for row in rows for step, _ in row["curve"]})
    lines = []
    for row in rows:
        losses = dict(row["curve"])
        cells = [f"{losses[step]:.4f}" if step in losses else "" for step in marks]
        lines.append([f"`{row['options']}`", *cells, f"{row['state_mib']} MiB"])
    head = ["options", *(f"{step:,} steps" for step in marks), "state"]
    return markdown(head, lines) + source(runs)


def quality_in_eight_bits(runs: Runs) -> str:
    """Loss with `--compute fp8`, against bf16."""
    lines = []
    both = {"`--compute fp8`": f"--compute fp8{EARLIER}", "bf16": f"--rule moment{EARLIER}"}
    for name, options in both.items():
        rows = sorted(rows_of(runs, preset="small", options=options), key=lambda row: row["seed"])
        losses = [row["held_out_nats"] for row in rows]
        seeds = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append([name, seeds, f"{mean(losses):.4f}", f"{stdev(losses):.4f}"])
    used = [
        run
        for run in runs
        if any(rows_of([run], preset="small", options=options) for options in both.values())
    ]
    return markdown(["", "seeds 0 to 5", "mean", "standard deviation"], lines) + source(used)


def speed(runs: Runs) -> str:
    """Bytes a second of a training step against the faster baseline's."""
    lines = []
    for preset in PRESETS:
        ours, peer = row_of(runs, preset=preset, kind="factored"), faster(runs, preset, "AdamW")
        orthogonal = row_of(runs, preset=preset, kind="orthogonal")
        lines.append(
            [
                f"`{preset}`",
                f"{ours['weights'] / 1e6:,.1f} M" if ours else "",
                _number(ours and ours["bytes_per_second"]),
                _number(peer and peer["bytes_per_second"]),
                _number(speed_ratio(ours, peer), ".2f"),
                _number(speed_ratio(orthogonal, faster(runs, preset, "Muon")), ".2f"),
            ]
        )
    head = ["preset", "weights", "`arb`, factored direction", "float AdamW", "ratio"]
    return markdown([*head, "ratio, orthogonal against Muon"], lines) + source(runs)


def ratios(runs: Runs) -> str:
    """Speed and memory of training steps as shares of the baselines'."""
    shapes = [row_of(runs, preset=preset, kind="factored") for preset in PRESETS]
    shown = [f"{row['ctx']}, {row['batch']}" if row else "" for row in shapes]
    lines = [["context, windows a batch", *shown]]
    for ours, title, twin in (
        ("factored", "factored", "AdamW"),
        ("factored, fp8", "factored with `--compute fp8`", "AdamW"),
        ("orthogonal", "orthogonal", "Muon"),
    ):
        for name in (twin, f"{twin}, no sub-norms", f"{twin}, bare"):
            pairs = [
                [row_of(runs, preset=preset, kind=kind) for kind in (ours, name)]
                for preset in PRESETS
            ]
            found = [_number(speed_ratio(*pair), ".2f") for pair in pairs]
            lines.append([f"speed, {title} against {name}", *found])
    for ours, twin in (("factored", "AdamW"), ("orthogonal", "Muon")):
        for field in ("allocated_bytes", "reserved_bytes"):
            found = []
            for preset in PRESETS:
                mine, peer = row_of(runs, preset=preset, kind=ours), faster(runs, preset, twin)
                known = mine and peer and field in mine and field in peer
                found.append(f"{mine[field] / peer[field]:.2f}" if known else "")
            how = field.removesuffix("_bytes")
            lines.append([f"peak {how}, {ours} against the faster {twin}", *found])
    kept = [line for line in lines if any(line[1:])]
    return markdown(["", *(f"`{preset}`" for preset in PRESETS)], kept) + source(runs)


def steps(runs: Runs) -> str:
    """Every training step that was timed."""
    lines = []
    for preset in PRESETS:
        for row in rows_of(runs, preset=preset):
            memory = [row.get(name) for name in ("allocated_bytes", "reserved_bytes")]
            lines.append(
                [
                    f"`{preset}`",
                    row["kind"],
                    f"{row['ms']:,.2f}",
                    f"{row['bytes_per_second']:,}",
                    *(_number(value and value / MIB, ",.0f") for value in memory),
                    _number(row.get("sm_mhz"), ".0f"),
                ]
            )
    head = ["preset", "step", "ms", "bytes/s", "MiB allocated", "MiB reserved", "GPU MHz"]
    return markdown(head, lines) + source(runs)


def peaks(runs: Runs) -> str:
    """MiB of training steps in processes of their own, and shares of the baselines'."""
    lines = []
    for row in rows_of(runs):
        twins = ("AdamW, no sub-norms", "AdamW, bare")
        found = [row_of(runs, preset=row["preset"], kind=kind) for kind in twins]
        size, predicted = row["allocated_bytes"], row["predicted_bytes"]
        lines.append(
            [
                f"`{row['preset']}`, {row['kind']}",
                f"{size / MIB:,.0f}",
                _number(predicted and predicted / MIB, ",.0f"),
                *(_number(twin and size / twin["allocated_bytes"], ".3f") for twin in found),
                f"{row['reserved_bytes'] / MIB:,.0f}",
            ]
        )
    head = ["step", "MiB", "predicted", "AdamW's being 1", "bare AdamW's being 1", "MiB reserved"]
    return _measured(head, lines, runs)


def products(runs: Runs) -> str:
    """Products and updates as multiples of cuBLAS's speed."""

    def ratio(size: str, rows: int, what: str, form: str) -> str:
        found = row_of(runs, size=size, rows=rows, what=what)
        return _number(found and found["ratio"], form)

    large, square = (4096, 8192, 16384), "8192x8192"
    lines = []
    for what, title, form in (
        ("forward", "8192 x 8192 forward, unpacking included", ".3f"),
        ("grad_x", "its gradient of x", ".3f"),
        (
            "forward, cuBLAS of these weights",
            "forward, cuBLAS given these ternary weights, whose zeros save power",
            ".3f",
        ),
        ("grad_x, cuBLAS of these weights", "gradient of x, the same", ".3f"),
        ("forward in fp8", "`--compute fp8`, forward", ".2f"),
        ("grad_x in fp8", "`--compute fp8`, gradient of x", ".2f"),
    ):
        lines.append([title, *(ratio(square, rows, what, form) for rows in large)])
    text = markdown(["large products", "M = 4096", "8192", "16384"], lines)
    few, lines = (1, 2, 4, 8), []
    for size, number in (("16384x16384", "eight"), (square, "31")):
        for what, title in (
            ("prepacked", "one alone, its launch included"),
            ("prepacked, in a row", f"each of {number} in a row, as a generated byte has them"),
        ):
            found = [row_of(runs, size=size, rows=rows, what=what) for rows in few]
            title = f"{size.replace('x', ' x ')}, {title}"
            lines.append([title, *(_number(row and row["ratio"], ".2f") for row in found)])
            lines.append(["in us", *(_number(row and row["us"], ".1f") for row in found)])
            shares = [_share(row and row["copy_share"]) for row in found]
            lines.append(["as a share of the copy bandwidth", *shares])
    kept = [line for line in lines if any(line[1:])]
    text += "\n" + markdown(["prepacked for generation", "M = 1", "2", "4", "8"], kept)
    some = (1, 2, 4, 8, 16, 32, 64)
    lines = [
        [size.replace("x", " x "), *(ratio(size, rows, "forward", ".2f") for rows in some)]
        for size in ("16384x16384", square)
    ]
    text += "\n" + markdown(["as trained", "M = 1", *map(str, some[1:])], lines)
    rules = ("moment", "nibble", "carry")
    lines = [
        [title, *(ratio(size, rows, f"update, {rule} factored", ".3f") for rule in rules)]
        for size, rows, title in (
            (square, 8192, "8192 x 8192, M = 8192"),
            ("11264x2048", 16384, "11264 x 2048, the largest matrix of `1b`, M = 16384"),
        )
    ]
    head = (
        "gradient of the weights and the whole update, factored, against cuBLAS computing that"
        " gradient alone"
    )
    text += "\n" + markdown([head, *(f"`{rule}`" for rule in rules)], lines)
    return text + source(runs)


def generation(runs: Runs) -> str:
    """Bytes a second at batch 1 against the float decoder's."""
    lines = []
    for ours in rows_of(runs, kind="moment"):
        name, prompt = ours["preset"], ours["prompt_bytes"]
        peer = row_of(runs, preset=name, prompt_bytes=prompt, kind="float bf16")
        rate, twin = ours["bytes_per_second"], peer["bytes_per_second"]
        lines.append(
            [
                f"`{name}`, after {prompt:,} byte{'s' * (prompt > 1)}",
                f"{rate:,.0f} bytes/s",
                f"{twin:,.0f} bytes/s",
                f"{rate / twin:.2f}",
                f"{_share(peer['copy_share'])} ({peer['mode']})",
            ]
        )
    head = ["", "`arb`", "float in bf16", "ratio", "its weights, share of the copy bandwidth"]
    return markdown(head, lines) + source(runs)


def several(runs: Runs) -> str:
    """Bytes a second of several texts at once, against the float decoder's."""
    lines = []
    for ours in rows_of(runs, kind="moment"):
        peer = row_of(runs, preset=ours["preset"], batch=ours["batch"], kind="float bf16")
        rate, twin = ours["bytes_per_second"], peer["bytes_per_second"]
        about = [f"`{ours['preset']}`", str(ours["batch"])]
        lines.append([*about, f"{rate:,.0f}", f"{twin:,.0f}", f"{rate / twin:.2f}"])
    return markdown(["", "texts", "`arb`", "float in bf16", "ratio"], lines) + source(runs)


def caches(runs: Runs) -> str:
    """Bytes a second by what keys and values are kept in."""
    lines = []
    for row in rows_of(runs):
        plain = row_of(runs, preset=row["preset"], ctx=row["ctx"], kv="bf16")
        rate, size = row["bytes_per_second"], row["cache_bytes"]
        about = [f"`{row['preset']}`, ctx {row['ctx']:,}", row["kv"], f"{size / MIB:,.0f} MiB"]
        lines.append([*about, f"{rate:,.0f}", f"{rate / plain['bytes_per_second']:.2f}"])
    return markdown(["", "kept in", "cache", "bytes/s", "ratio"], lines) + source(runs)


def chunked(runs: Runs) -> str:
    """Speed of every kind of chunked model against a dense one of its size."""
    lines = []
    for row in rows_of(runs):
        peer = row_of(runs, preset=row["preset"], kind="dense")
        cells = [f"`{row['preset']}`", row["kind"], f"{row['ctx']:,}"]
        for name in ("bytes_per_second", "generated_bytes_per_second"):
            cells += [f"{row[name]:,.0f}", f"{row[name] / peer[name]:.2f}"]
        lines.append([*cells, f"{row['allocated_bytes'] / MIB:,.0f}"])
    head = [
        "preset", "boundaries", "ctx", "trained bytes/s", "ratio", "generated bytes/s", "ratio",
        "MiB allocated",
    ]  # fmt: skip
    return markdown(head, lines) + source(runs)


def families(runs: Runs) -> str:
    """Speed and peak of a step of other families against plain PyTorch, and the float baseline."""
    lines = []
    for family in dict.fromkeys(row["preset"] for row in rows_of(runs)):
        for ours, peer in (("factored", "AdamW"), ("orthogonal", "Muon")):
            kinds = ours, peer, f"{peer}, bare", f"{peer}, bare, flex"
            mine, twin, *plain = (row_of(runs, preset=family, kind=kind) for kind in kinds)
            measured = [row for row in plain if row]
            if not (mine and measured):
                continue
            bare = min(measured, key=lambda row: row["ms"])
            rates = (f"{row['bytes_per_second']:,}" for row in (mine, bare))
            lines.append(
                [
                    f"`{family}`",
                    f"{ours} against {peer}",
                    *rates,
                    _number(speed_ratio(mine, bare), ".2f"),
                    _number(speed_ratio(mine, twin), ".2f"),
                    f"{mine['allocated_bytes'] / bare['allocated_bytes']:.2f}",
                ]
            )
    head = [
        "model", "step", "`arb`, bytes/s", "plain PyTorch, bytes/s", "ratio",
        "ratio to the float baseline", "peak allocated, ratio to plain",
    ]  # fmt: skip
    return _measured(head, lines, runs)


def chunked_quality(runs: Runs) -> str:
    """Losses of every kind of chunked model, and of a dense one, after the same time."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows_of(runs)))
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows_of(runs):
        cell = tuple(row[name] for name in ("preset", "ctx", "text", "seconds"))
        found.setdefault(cell, {})[row["kind"]] = row
    lines = []
    for (preset, ctx, text, seconds), rows in found.items():
        best = min(row["held_out_nats"] for row in rows.values())
        cells = [f"`{preset}`", f"{ctx:,}", text, f"{seconds:g} s"]
        for row in (rows.get(kind) for kind in kinds):
            loss = f"{row['held_out_nats']:.4f}" if row else ""
            cells.append(f"**{loss}**" if row and row["held_out_nats"] == best else loss)
        lines.append(cells)
    return markdown(["size", "ctx", "text", "time", *kinds], lines) + source(runs)


def exports(runs: Runs) -> str:
    """Compare what other programs make of an export with what `arb` computes."""
    head = ["model", "program", "type", "bytes a weight", "from arb", "from float64"]
    head += ["first divergence"]
    rows = []
    for row in rows_of(runs):
        first, is_export = row.get("first_divergence"), "bytes" in row
        rows.append(
            [
                f"`{row['model']}`",
                row["program"],
                row["type"],
                f"{row['bytes'] / row['num_weights']:.3f}" if is_export else "",
                f"{row['largest']:.1e}" if row["largest"] else "",
                f"{row['from_float64']:.1e}",
                ("none" if first is None else f"byte {first}") if is_export else "",
            ]
        )
    return markdown(head, rows) + source(runs)


def imports(runs: Runs) -> str:
    """Compare models that were read in with Transformers."""
    head = ["model", "rule", "group", "float baseline from Transformers", "weights off by"]
    rows = [
        [
            row["kind"],
            f"`{row['rule']}`",
            row["scale_type"],
            f"{row['from_float']:.1e}",
            f"{row['relative_error']:.2%}",
            f"{row['divergence']:.2e}",
            f"{row['of_q8_0']:.2e}",
        ]
        for row in rows_of(runs)
        if "divergence" in row
    ]
    return markdown([*head, "KL", "KL of Q8_0"], rows) + source(runs)


def large_tuning(runs: Runs) -> str:
    """List what tuning takes at large shapes, and how fast it is."""
    head = ["shape", "kind", "batch", "state", "allocated", "predicted", "reserved", "predicted"]
    rows = [
        [
            row["shape"].upper(),
            row["kind"],
            f"{row['batch']} x {row['ctx']:,}" + (", recomputed" if row["recompute"] else ""),
            *(_gib(row[f"{name}_bytes"]) for name in LARGE_BYTES),
            "" if row["cap_gib"] is None else f"{row['cap_gib']} GiB",
            _number(row["tokens_per_second"]),
        ]
        for row in rows_of(runs)
    ]
    return markdown([*head, "cap", "tokens/s"], rows) + source(runs)


LARGE_BYTES = (
    "state",
    "allocated",
    "predicted_allocated",
    "reserved",
    "predicted_reserved",
)


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.3f}"


def tuning(runs: Runs) -> str:
    """List each way of tuning at its best rate, the best way first: losses, bytes and speed."""
    tuned = [row for row in rows_of(runs) if row["part"] != "speed"]
    by_way: dict[tuple[str, float], list[Row]] = {}
    for row in tuned:
        by_way.setdefault((row["kind"], row["lr"]), []).append(row)
    best: dict[str, float] = {}
    for kind, lr in sorted(by_way, key=lambda way: mean(row["new"] for row in by_way[way])):
        best.setdefault(kind, lr)
    lines = []
    for kind, lr in best.items():
        speed = row_of(runs, part="speed", kind=kind)
        lines.append(
            [
                kind,
                f"{lr:g}",
                *_seeds(tuned, kind=kind, lr=lr),
                f"{by_way[kind, lr][0]['state_bytes'] / 1e6:.1f}",
                f"{speed['peak_bytes'] / 1e9:.2f}" if speed else "",
                _number(speed["bytes_per_second"]) if speed else "",
            ]
        )
    head = ["way", "best rate", "new text", "old text", "state, MB", "peak, GB", "bytes/s"]
    return markdown(head, lines) + source(runs)


def tuning_rates(runs: Runs) -> str:
    """List what a model of code learns of novels, and what it forgets, by rate."""
    tuned = [row for row in rows_of(runs) if row["part"] != "speed"]
    kinds = [*dict.fromkeys(row["kind"] for row in tuned)]
    pairs = {(row["kind"], row["lr"]) for row in tuned}
    lines = [
        [kind, f"{lr:g}", *_seeds(tuned, kind=kind, lr=lr)]
        for kind, lr in sorted(pairs, key=lambda pair: (kinds.index(pair[0]), pair[1]))
    ]
    return markdown(["way", "rate", "new text", "old text"], lines) + source(runs)


WAYS_TO_TRITS = {
    "muon": "straight-through latents, Muon",
    "moment imported": "`moment`, all digits, as imported",
    "nibble imported": "`nibble`, all digits, as imported",
    "moment rounded": "`moment`, rounded without training",
    "nibble rounded": "`nibble`, rounded without training",
}


def ways_to_trits(runs: Runs) -> str:
    """List ways to a ternary model with a loss for each seed, by the mean loss of both texts."""
    ways: dict[tuple, list[Row]] = {}
    for row in sorted(rows_of(runs), key=lambda row: row["seed"]):
        fields = ("kind", "lr", "taught", "fade_from", "fade_to")
        ways.setdefault(tuple(row[field] for field in fields), []).append(row)
    lines = []
    for rows in sorted(ways.values(), key=lambda rows: mean(r["new"] + r["old"] for r in rows)):
        row = rows[0]
        fades = row["kind"] not in WAYS_TO_TRITS
        peaks = sorted({each.get("peak_bytes") or 0 for each in rows} - {0})
        way = f"`{row['kind']}`" if fades else WAYS_TO_TRITS[row["kind"]]
        lines.append(
            [
                way + (", taught" if row["taught"] else ""),
                f"{row['fade_from']:.0%} to {row['fade_to']:.0%}" if fades else "",
                f"{row['lr']:g}" if row["lr"] else "",
                *(", ".join(f"{each[text]:.4f}" for each in rows) for text in ("new", "old")),
                f"{row['state_bytes'] / 1e6:.0f}" if row["state_bytes"] else "",
                ", ".join(f"{peak / 1e6:,.0f}" for peak in peaks),
            ]
        )
    head = ["way", "weights fade", "rate", "novels", "code", "state, MB", "peak, MB"]
    if not any(line[-1] for line in lines):  # earlier rows have none
        head, lines = head[:-1], [line[:-1] for line in lines]
    return _measured(head, lines, runs)


def low_rates(runs: Runs) -> str:
    """List losses of the new text at low rates, and shares of what float weights gain there."""
    begun = row_of(runs, kind="begun")
    lines = []
    for row in rows_of(runs):
        like = row_of(runs, kind="float", lr=row["lr"])
        gained = ""
        if begun and like and row is not like:
            gained = f"{(begun['new'] - row['new']) / (begun['new'] - like['new']):.1%}"
        if row["lr"]:
            way = ROUNDED_TO.get(row["kind"], f"`{row['kind']}`"), ROUNDINGS[row["rounding"]]
            lines.append([*way, f"{row['lr']:g}", f"{row['new']:.4f}", gained, f"{row['old']:.4f}"])
    head = ["weights", "rounding", "rate", "new text", "of float's gain", "old text"]
    return _measured(head, sorted(lines, key=lambda line: (line[2], line[3])), runs)


ROUNDED_TO = {"float": "float", "AdamW": "float, AdamW"} | {
    grid: f"{grid} levels" for grid in ("43", "255", "765")
}
ROUNDINGS = {
    "none": "",
    "random": "random bits",
    "turned": "low-discrepancy bits",
    "nearest": "to the nearest",
    "kept": "to the nearest, the error kept",
}


def _seeds(rows: list[Row], **fields: Any) -> list[str]:
    """List new and old losses of all seeds."""
    some = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    some.sort(key=lambda row: row["seed"])
    return [", ".join(f"{row[name]:.4f}" for row in some) for name in ("new", "old")]


def bits_of_many(runs: Runs) -> str:
    """Compare states after the same steps on several GPUs and on one."""
    found = _only(runs, part="bits")
    lines = [
        [
            f"`{row['preset']}`, {row['kind']}",
            f"{row['gpus']}",
            f"{row['steps']}",
            f"{row['tensors'] - row['tensors_that_differ']} of {row['tensors']}",
            "yes" if row["losses_equal"] else "no",
            f"{row['wire_bytes_a_weight']:.3f}",
        ]
        for row in rows_of(found)
    ]
    head = ["", "GPUs", "steps", "tensors equal to one GPU's", "losses equal"]
    return _measured([*head, "bytes a step, weight and GPU"], lines, found)


def speed_of_many(runs: Runs) -> str:
    """Time of a step where each GPU has one micro-batch, and what it is of linear."""
    found, lines = _only(runs, part="speed"), []
    for row in rows_of(found):
        one = row_of(found, preset=row["preset"], kind=row["kind"], gpus=1)
        linear = one["ms"] / row["ms"] if one and row["gpus"] > 1 else None
        lines.append(
            [
                f"`{row['preset']}`",
                row["kind"].replace("twin", "baseline") + ", captured" * row["captured"],
                f"{row['gpus']}",
                f"{row['ms']:.2f}",
                f"{row['bytes_per_second']:,.0f}",
                _share(linear),
                f"{row['wire_bytes_a_weight']:.3f}" if row["wire_bytes_a_weight"] else "",
                f"{max(row['state_bytes']) / 1e9:.3f}",
                f"{max(row['peak_bytes']) / 1e9:.2f}",
            ]
        )
    head = ["preset", "kind", "GPUs", "ms a step", "trained bytes/s", "of linear"]
    head += ["bytes a step, weight and GPU", "state of a GPU, GB", "peak of a GPU, GB"]
    return _measured(head, lines, found)


def quality_of_many(runs: Runs) -> str:
    """Held-out loss of whole runs by gradients that travel, against those of the other rule."""
    found = _only(runs, part="quality")
    means = {}
    for kind in dict.fromkeys(row["kind"] for row in rows_of(found)):
        means[kind] = mean(row["val_loss"] for row in rows_of(found, kind=kind))
    first = next(iter(means.values()), 0.0)
    lines = [
        [
            kind,
            ", ".join(f"{row['val_loss']:.4f}" for row in rows_of(found, kind=kind)),
            f"{loss:.4f}",
            f"{loss / first - 1:+.2%}".replace("%", " %"),
        ]
        for kind, loss in means.items()
    ]
    return _measured(["parts and windows", "by seed", "mean", "from the first"], lines, found)


def long_speed(runs: Runs) -> str:
    """Training, text and cache of compressed attention against dense, at ctx 16,384."""
    lines = []
    for row in rows_of(runs):
        made = row["texts"].values()
        lines.append(
            [
                row["kind"],
                f"{row['weights'] / 1e6:.1f} M",
                f"{row['bytes_per_second']:,}",
                " / ".join(f"{text['generated_bytes_per_second']:,.0f}" for text in made),
                " / ".join(f"{text['cache_bytes'] / MIB:.1f}" for text in made),
            ]
        )
    kept = " / ".join(next(iter(rows_of(runs)), {"texts": {}})["texts"])
    head = ["attention", "weights", "trained bytes/s", f"text, bytes/s: {kept}", "cache, MiB"]
    return _measured(head, lines, runs)


def long_options(runs: Runs) -> str:
    """Held-out loss of options after ten seconds, by seed."""
    lines, runs = [], _only(runs, seconds=10)
    for kind in dict.fromkeys(row["kind"] for row in rows_of(runs)):
        first, *others = rows_of(runs, kind=kind)
        nats = ", ".join(f"{row['nats']:.4f}" for row in (first, *others))
        size = f"{first['weights'] / 1e6:,.1f} M"
        lines.append([kind, size, f"{first['ms']:.1f}", f"{first['steps']:,}", nats])
    return _measured(["option", "weights", "ms", "steps", "nats by seed"], lines, runs)


def long_quality(runs: Runs) -> str:
    """Held-out loss after equal time at ctx 16,384, by position, and with a cache in eight bits."""
    lines, starts, runs = [], [], _only(runs, seconds=60)
    for row in rows_of(runs):
        kept = row["kept_in"]
        starts = [f"from {first:,}" for first, *_ in row["by_position"]]
        more = [
            f"{kept[kv]['nats'] - kept['bf16']['nats']:+.5f}" if kv in kept else ""
            for kv in ("int8", "fp8")
        ]
        lines.append(
            [
                row["kind"],
                f"{row['weights'] / 1e6:.1f} M",
                f"{row['seconds']:g}",
                f"{row['steps']:,}",
                f"{row['trained_bytes'] / 1e6:.1f}",
                f"{row['nats']:.4f}",
                *(f"{nats:.4f}" for *_, nats in row["by_position"]),
                *more,
                f"{kept['bf16']['cache_bytes'] / MIB:.1f}",
            ]
        )
    head = ["attention", "weights", "seconds", "steps", "MB read", "nats", *starts]
    return _measured([*head, "`int8`", "`fp8`", "cache, MiB"], lines, runs)


def streams(runs: Runs) -> str:
    """Held-out loss of one and of several residual streams, by seed."""
    found = _only(runs, part="streams")
    lines = []
    for variant, steps in dict.fromkeys((r["variant"], r["steps"]) for r in rows_of(found)):
        rows = rows_of(found, variant=variant, steps=steps)
        losses = [row["held_out_nats"] for row in sorted(rows, key=lambda row: row["seed"])]
        lines.append(
            [
                variant.replace("-", " "),
                f"{rows[0]['weights'] / 1e6:.2f} M",
                f"{steps:,}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(losses):.4f}",
            ]
        )
    return _measured(["streams", "weights", "steps", "nats by seed", "mean"], lines, found)


def gates(runs: Runs) -> str:
    """Held-out loss and the fullest expert, by the choice of experts."""
    found, lines = _only(runs, part="gates"), []
    kinds = {(row["variant"], row["lr"], row["steps"]): None for row in rows_of(found)}
    for variant, lr, steps in sorted(kinds, key=lambda kind: ("factored" in kind[0], kind[1])):
        rows = rows_of(found, variant=variant, lr=lr, steps=steps)
        rows = sorted(rows, key=lambda row: row["seed"])
        lines.append(
            [
                f"`{variant.split('-')[0]}`" + ", shared expert" * ("shared" in variant),
                "`nibble`, factored" if "factored" in variant else "`moment`",
                f"{lr:g}",
                f"{steps:,}",
                ", ".join(f"{row['held_out_nats']:.4f}" for row in rows),
                ", ".join(f"{row['fullest_expert']:.2f}" for row in rows),
            ]
        )
    head = ["choice", "rule", "`--lr`", "steps", "nats by seed", "fullest expert over the mean"]
    return _measured(head, lines, found)


def deep(runs: Runs) -> str:
    """Measurements of a model of many blocks, a line each."""
    rows = {(row["part"], row["variant"]): row for row in rows_of(runs)}
    if not rows:
        return _measured([], [], [])
    steps, seen = rows["train", ""], rows["causality", ""]
    losses = ", ".join(f"{loss:.2f}" for loss in steps["losses"])
    rms = seen["residual_rms"]
    moved = sum(seen["acausal_positions_by_layer"])
    lines = [
        ["weights", f"{steps['weights'] / 1e6:,.1f} M"],
        [f"loss in {len(steps['losses'])} steps, nats a byte", losses],
        ["peak, predicted", f"{steps['predicted_peak_bytes']:,} bytes"],
        ["peak, measured", f"{steps['peak_bytes']:,} bytes"],
        ["a step, not captured", f"{steps['seconds_a_step']:.2f} s"],
        ["positions that a later byte moves, of all blocks", f"{moved}"],
        ["residual stream after the embedding, after each tenth block, and last",
         ", ".join(f"{value:.2f}" for value in [*rms[::10], rms[-1]])],
    ]  # fmt: skip
    for (part, variant), row in rows.items():
        if part == "cosines":
            least = f"1 - {1 - row['least_cosine']:.0e}"
            lines.append([f"least cosine of a block's attention, after {variant}", least])
        if part == "text":
            size = f"{row['cache_bytes'] / 2**20:.2f} MiB"
            lines.append([f"cache of 700 bytes in {variant}", size])
        if part == "indexer":
            what = f"choices of eight bits that float32 shares, {row['chosen']} of {variant}"
            alone = f"{row['shared']:.1%}, of queries alone {row['shared_by_queries']:.1%}"
            lines.append([what, alone.replace("%", " %")])
    return _measured(["`arb-deep`", "measured"], lines, runs)


def batches(runs: Runs) -> str:
    """Time and memory of a step by the number of windows, the first step apart."""
    rows = [row for row in rows_of(runs) if row["kind"] in ("tiny", "arb-3b")]
    used = [run for run in runs if any(row in rows for row in run["rows"])]
    lines = [
        [
            f"`{row['kind']}`" + ", `--recompute`" * row["recompute"],
            f"{row['batch']:,}",
            f"{row['ms']:,.1f}",
            f"{row['bytes_per_second']:,}",
            f"{row['first_ms'] / 1e3:.1f}",
            f"{row['allocated_bytes'] / MIB:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row["kind"] != "tiny", row["batch"]))
    ]
    head = ["preset", "batch", "ms", "bytes/s", "first step, s", "peak, MiB"]
    return _measured(head, lines, used)


def signs(runs: Runs) -> str:
    """Time and memory of a step of `votes`, whose gradients are stored as signs or as floats."""
    rows = [row for row in rows_of(runs) if row["kind"].startswith("votes")]
    used = [run for run in runs if any(row in rows for row in run["rows"])]
    lines = [
        [
            row["kind"].removeprefix("votes, "),
            f"{row['batch']}" + ", `--recompute`" * row["recompute"],
            f"{row['ms']:,.1f}",
            f"{row['bytes_per_second']:,}",
            f"{row['allocated_bytes'] / MIB:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row["batch"], row["kind"]))
    ]
    return _measured(["gradients", "batch", "ms", "bytes/s", "peak, MiB"], lines, used)


MAMBA = "hnet-base, mamba"
"""A model whose outer blocks are Mamba-2."""


def step_kernels(runs: Runs) -> str:
    """Milliseconds and share of a training step of `MAMBA` by what its kernels do."""
    lines, runs = [], _only(runs, model=MAMBA)
    for row in rows_of(runs):
        parts = row["by_kind_ms"]
        lines += [
            [kind, f"{ms:.2f}", _share(ms / sum(parts.values()))] for kind, ms in parts.items()
        ]
        for field, title in (
            ("kernel_ms", "all kernels, one after another"), ("step_ms", "a captured step"),
            ("step_by_step_ms", "a step that is not captured"),
            ("host_ms", "launching its kernels, on the host"),
        ):  # fmt: skip
            lines.append([title, f"{row[field]:.2f}", ""])
    return _measured(["kernels", "ms", "share"], lines, runs)


def step_budget(runs: Runs) -> str:
    """Milliseconds of a training step by kind of kernel, and the least that each could take."""
    rows = rows_of(runs)
    kinds = dict.fromkeys(kind for row in rows for kind in row["kinds"])
    lines = []
    for kind in kinds:
        found = [row["kinds"][kind] for row in rows]
        lines.append([kind, *(f"{f['ms']:.2f}, {f['floor_ms']:.2f}" for f in found)])
    totals = [[row["kinds"][kind] for kind in kinds] for row in rows]
    sums = [[sum(f[name] for f in found) for name in ("ms", "floor_ms")] for found in totals]
    lines.append(["all kernels", *(f"{ms:.2f}, {floor:.2f}" for ms, floor in sums)])
    lines.append(["a captured step", *(f"{row['step_ms']:.2f}" for row in rows)])
    head = ["ms, and at the machine's rates", *(f"`{row['model']}`" for row in rows)]
    return _measured(head, lines, runs)


def ablation(runs: Runs) -> str:
    """Held-out losses of variants of `arb-tiny` in the same time, by seed."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows_of(runs)):
        rows = sorted(rows_of(runs, variant=variant), key=lambda row: row["seed"])
        losses = [row["held_out_nats"] for row in rows]
        without = [row.get("held_out_nats_without_edges") for row in rows]
        lines.append(
            [
                f"`{variant}`",
                f"{rows[0]['ms']:.2f}",
                f"{rows[0]['steps']:,}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{mean(losses):.4f}",
                "" if None in without else f"{mean(without):.4f}",
            ]
        )
    head = ["parts", "ms", "steps", "nats by seed", "mean", "mean without edges"]
    return _measured(head, lines, runs)


def searched(runs: Runs, text: str, ctx: int, *, small: bool = False) -> str:
    """Held-out losses of combinations of parts in equal time, by round."""
    kinds: dict[str, dict[tuple[str, float, str], list[float]]] = {}
    runs = [
        run | {"rows": [
            row for row in run["rows"]
            if row["text"].split(",")[0] == text and row["ctx"] == ctx
            and row["kind"].startswith("small") == small
        ]}
        for run in runs
    ]  # fmt: skip
    runs = [run for run in runs if run["rows"]]
    for row in rows_of(runs):
        half = "other half" if "," in row["text"] else "one half"
        place = (half, row["seconds"], row["digits"])
        kinds.setdefault(row["kind"], {}).setdefault(place, []).append(row["held_out_nats"])
    # those of the half that chose come first, and trits last
    places = sorted(
        {place for found in kinds.values() for place in found},
        key=lambda place: (place[0] == "other half", place[2] == "trit", place[1]),
    )
    head = ["model"] + [
        f"{half}, {seconds:g} s" + ("" if digits == "all" else ", trits")
        for half, seconds, digits in places
    ]

    rounds = [place for place in places if place[0] == "one half"][::-1]

    def rank(kind: str) -> list[float]:
        """Compare by the later rounds first."""
        return [min(kinds[kind].get(place, [9.0])) for place in rounds]

    lines = [
        [kind, *(", ".join(f"{x:.4f}" for x in kinds[kind].get(place, ())) for place in places)]
        for kind in sorted(kinds, key=rank)
    ]
    return _measured(head, lines, runs)


def stage_rates(runs: Runs) -> str:
    """Held-out losses by the factor of a stage's learning rate, for each seed."""
    found: dict[tuple, dict[float, list[float]]] = {}
    for row in sorted(rows_of(runs), key=lambda row: row["seed"]):
        place = found.setdefault(tuple(row[name] for name in ("model", "steps", "lr", "stage")), {})
        place.setdefault(row["factor"], []).append(row["held_out_nats"])
    factors = sorted({factor for losses in found.values() for factor in losses})
    lines = []
    for (*run, stage), losses in sorted(found.items()):
        all_losses = losses | {1.0: found[*run, "all"][1.0]}
        cells = (all_losses.get(factor, []) for factor in factors)
        losses_of = [", ".join(f"{x:.4f}" for x in cell) for cell in cells]
        model, steps, lr = run
        lines.append([model, f"{steps:,}", f"{lr:g}", stage, *losses_of])
    head = ["model", "steps", "`--lr`", "faster or slower", *(f"{factor:g}" for factor in factors)]
    return _measured(head, lines, runs)


def checked_texts(runs: Runs) -> str:
    """Speed of texts of trained models by checks, with the largest bonus of a repetition."""
    ways = [row for row in rows_of(runs) if "bytes_per_check" in row]
    alone = {(row["preset"], row["way"]): row for row in ways if row["size"] == 1}
    kept: dict[tuple, Row] = {}
    for row in sorted((row for row in ways if row["size"] > 1), key=lambda row: row["favour"] or 0):
        kept[tuple(row[name] for name in ("preset", "way", "size", "has_head"))] = row
    names = {"small-ahead": "`small`", "base-ahead": "`base`"}
    names |= {"1b-ahead": "`1b`, 560 steps", "1b-ahead2": "`1b`, 760 steps"}
    lines = []
    order = [*names, *(key[0] for key in kept)]
    for key in sorted(kept, key=lambda key: (order.index(key[0]), key)):
        row, (name, way, size, has_head) = kept[key], key
        lines.append(
            [
                names.get(name, f"`{name}`"),
                way,
                str(size),
                f"head, {row['favour']:g}" if has_head else "text alone",
                _speeds(alone[name, way]),
                _speeds(row),
                f"{mean(row['bytes_per_check']):.2f}",
                f"{row['times']:.2f}",
                "yes" if row["same"] else "**no**",
            ]
        )
    head = [
        "model", "sampling", "`--ahead`", "proposals", "bytes/s without", "with", "bytes a check",
        "times as fast", "same text",
    ]  # fmt: skip
    return _measured(head, lines, runs)


def _speeds(row: Row) -> str:
    low, high = min(row["bytes_per_second"]), max(row["bytes_per_second"])
    return f"{low:,} to {high:,}"


def codebooks(runs: Runs) -> str:
    """Use of codes, step times and losses of vector quantisers and product keys."""
    kinds = {"nearest": "quantiser", "keys": "product keys", "none": "no codebook"}
    shapes = {"shared": "131,072 x 1,024", "knowledge": "5,000,000 x 64"}
    lines = []
    for shape in shapes:
        for kind in kinds:
            row = row_of(runs, shape=shape, kind=kind)
            if row:
                # the first steps are compiled
                (early, begin, _), (late, end, _) = row["told"][0], row["told"][-1]
                share, dead = (
                    f"{100 * row[name]:.3g} %" if name in row else ""
                    for name in ("used_share", "dead_share")
                )
                lines.append(
                    [
                        shapes[shape],
                        kinds[kind],
                        f"{1000 * (end - begin) / (late - early):.2f}",
                        f"{row['val_loss']:.4f}",
                        share,
                        _number(row.get("perplexity"), ",.0f"),
                        dead,
                        f"{row['state_bytes'] / MIB:,.0f}",
                    ]
                )
    head = [
        "rows", "kind", "ms per step", "held-out nats per byte", "used", "perplexity", "dead",
        "state, MiB",
    ]  # fmt: skip
    return _measured(head, lines, runs)


def holes(runs: Runs) -> str:
    """Losses in holes, and by how much they exceed those of the model of the next byte."""
    kinds = {"fill": "fill", "masked": "masked", "masked from left to right": "masked"}
    lines = []
    for size in sorted({row["hole"] for row in rows_of(runs)}):
        for kind, name in kinds.items():
            row = row_of(runs, run=name, hole=size)
            if row:
                losses = row["nats_per_byte"]
                without = losses.get(f"{kind} without the right side")
                error = row.get("standard_error", {}).get(kind)
                lines.append(
                    [
                        str(size),
                        kind,
                        f"{losses[kind]:.4f}",
                        _number(without, ".4f"),
                        f"{losses['next']:.4f}",
                        f"{losses[kind] - losses['next']:+.4f}"
                        + (f" ± {error:.4f}" if error else ""),
                    ]
                )
    head = [
        "hole, bytes", "objective", "both sides", "left side alone", "`next`, left side",
        "both sides less `next`",
    ]  # fmt: skip
    return _measured(head, lines, runs)


def heard(runs: Runs) -> str:
    """Bits that sounds save after their own text."""
    names = {"words-again.txt": "heard, in another reading", "words-val.txt": "not heard"}
    lines = [
        [
            row["run"],
            names.get(row["text"], row["text"]),
            str(row["sounds"]),
            f"{row['bits_per_sample']:.3f}",
            f"{row['after_others']:.3f}",
            f"{row['bits_saved_per_sound']:.1f} ± {row['standard_error']:.1f}",
            f"{row['own_is_likeliest']:.0%}, {row['by_chance']:.0%}".replace("%", " %"),
        ]
        for row in rows_of(runs)
    ]
    head = [
        "model", "words", "sounds", "bits per sample after its text", "after another's",
        "bits saved per sound", "own text is the likeliest, by chance",
    ]  # fmt: skip
    return _measured(head, lines, runs)


def _only(runs: Runs, **fields: Any) -> Runs:
    found = [run | {"rows": rows_of([run], **fields)} for run in runs]
    return [run for run in found if run["rows"]]


def _measured(head: Sequence[str], lines: Sequence[Sequence[str]], runs: Runs) -> str:
    return markdown(head, lines) + source(runs) if runs else "Not measured yet.\n"


def losses_by_size(runs: Runs) -> str:
    """Held-out losses of every kind by size and length, one seed."""
    rows = rows_of(runs, seed=0)
    lengths = sorted({row["steps"] for row in rows})
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        place = groups.setdefault((row["kind"], row["weights"]), {})
        place[row["steps"]] = row["held_out_nats"]
    lines = [
        [kind, f"{weights / 1e6:.1f} M", *(_number(found.get(steps), ".4f") for steps in lengths)]
        for (kind, weights), found in sorted(groups.items())
    ]
    return _measured(["kind", "weights", *(f"{n:,} steps" for n in lengths)], lines, runs)


def laws(runs: Runs) -> str:
    """The law that is fitted to each kind's losses, each number with its standard error."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows_of(runs)):
        found = fit(rows_of(runs, kind=kind))
        if found:
            pairs = zip(found.law, found.errors, strict=True)
            numbers = [
                f"{value:.2f} ± {error:.2f}" if isfinite(error) else "not determined"
                for value, error in pairs
            ]
            lines.append([kind, *numbers, f"{found.residual:.2%}".replace("%", " %")])
    return _measured(["kind", "E", "A", "B", "a", "b", "residual"], sorted(lines), runs)


FRONTIER_SECONDS = 7.2
"""Seconds of one GPU, in which AdamW makes 2,000 steps of 10.8 million weights."""
FRONTIER_BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
"""MiB."""


def best_within(steps: Runs, losses: Runs, kind: str, budget: float) -> tuple[float, Row] | None:
    """Return the lowest loss of a kind within a time and memory, and its step.

    Args:
        steps: results of `frontier`.
        losses: results of `scaling`.
        kind: of training.
        budget: of the peak, in MiB.
    """
    found = []
    for row in rows_of(steps, kind=kind):
        lengths = rows_of(losses, kind=kind, shape=row["shape"], seed=0)
        count = 1e3 * FRONTIER_SECONDS / row["ms"]
        enough = any(count >= length["steps"] for length in lengths)
        if row["peak_mib"] <= budget and enough:
            found.append((between(lengths, count), row))
    return min(found, key=lambda pair: pair[0], default=None)


def frontier_losses() -> Runs:
    """Read all losses by size and length that the frontier is made of."""
    return [*load("scaling"), *load("scaling_others")]


def frontier(runs: Runs) -> str:
    """The best held-out loss of every kind by budget of memory, and the model that has it."""
    losses, lines = frontier_losses(), []
    for kind in sorted({row["kind"] for row in rows_of(runs)}):
        cells = []
        for budget in FRONTIER_BUDGETS:
            best = best_within(runs, losses, kind, budget)
            cells.append(f"{best[0]:.3f} ({best[1]['weights'] / 1e6:.1f} M)" if best else "")
        lines.append([kind, *cells])
    head = ["peak, at most", *(f"{budget:,} MiB" for budget in FRONTIER_BUDGETS)]
    return _measured(head, lines, runs)


def steps_by_size(runs: Runs) -> str:
    """Milliseconds and peaks of the steps that the frontier is made of."""
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows_of(runs):
        groups.setdefault((row["kind"], row["weights"]), {})[row["way"]] = row
    ways = list(dict.fromkeys(row["way"] for row in rows_of(runs)))
    lines = []
    for (kind, weights), found in sorted(groups.items()):
        cells = [
            f"{found[way]['ms']:.2f} ms, {found[way]['peak_mib']} MiB" if way in found else ""
            for way in ways
        ]
        lines.append([kind, f"{weights / 1e6:.1f} M", *cells])
    return _measured(["kind", "weights", *ways], lines, runs)


def commands(runs: Runs) -> str:
    """Write the seconds of the README's commands, with empty caches and again."""
    lines = []
    for row in rows_of(runs, again=False):
        again = row_of(runs, command=row["command"], again=True)
        loss = "" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
        seconds = [f"{each['seconds']:.1f}" if each else "" for each in (row, again)]
        lines.append([f"`{row['command']}`", *seconds, loss])
    head = ["command", "seconds, with empty caches", "again", "held-out loss"]
    return _measured(head, lines, runs)


def short_table(runs: Runs) -> list[str]:
    """Write the rows of any file as lines, leaving out what is long."""
    lines = []
    for run in runs:
        for row in run["rows"]:
            shown = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
            lines.append(", ".join(f"{key} {value}" for key, value in shown.items()))
    return lines


TABLES: dict[str, tuple[str, Callable[[Runs], str]]] = {
    "quality": ("quality", quality),
    "quality-small": ("quality", quality_of_small),
    "quality-base": ("quality", quality_of_base),
    "quality-fp8": ("quality", quality_in_eight_bits),
    "quality-code": ("code", quality_of_code),
    "curves-code": ("code_base", curves_of_code),
    "cpu-step": ("cpu_step", steps_on_a_cpu),
    "cpu-text": ("cpu_text", text_on_a_cpu),
    "speed": ("training_step", speed),
    "ratios": ("training_step", ratios),
    "steps": ("training_step", steps),
    "peaks": ("peaks", peaks),
    "products": ("products", products),
    "generation": ("generation", generation),
    "exports": ("exports", exports),
    "imports": ("imports", imports),
    "large-tuning": ("large_tuning", large_tuning),
    "tuning": ("tuning", tuning),
    "tuning-rates": ("tuning", tuning_rates),
    "low-rates": ("low_rates", low_rates),
    "ternary-tuning": ("ternary_tuning", ways_to_trits),
    "several-texts": ("several_texts", several),
    "kv-cache": ("kv_cache", caches),
    "hnet": ("hnet", chunked),
    "families": ("families", families),
    "long-speed": ("long", long_speed),
    "long-quality": ("long_quality", long_quality),
    "long-options": ("long_quality", long_options),
    "streams": ("streams", streams),
    "gates": ("streams", gates),
    "deep": ("deep", deep),
    "batches": ("arb_3b", batches),
    "signs": ("arb_3b", signs),
    "step-kernels": ("step_kernels", step_kernels),
    "step-budget": ("step_budget", step_budget),
    "ablation": ("ablation", ablation),
    "stage-rates": ("stage_rates", stage_rates),
    "checked-texts": ("checked_texts", checked_texts),
    "codebooks": ("codes", codebooks),
    "holes": ("holes", holes),
    "heard": ("heard", heard),
    "search-novels-4096": ("search", partial(searched, text="novels", ctx=4096)),
    "search-novels-16384": ("search", partial(searched, text="novels", ctx=16384)),
    "search-code-4096": ("search", partial(searched, text="code", ctx=4096)),
    "search-code-16384": ("search", partial(searched, text="code", ctx=16384)),
    "search-small-1024": ("search", partial(searched, text="novels", ctx=1024, small=True)),
    "search-small-4096": ("search", partial(searched, text="novels", ctx=4096, small=True)),
    "scaling": ("scaling", losses_by_size),
    "scaling-laws": ("scaling", laws),
    "frontier": ("frontier", frontier),
    "frontier-steps": ("frontier", steps_by_size),
    "many-gpus-bits": ("many_gpus", bits_of_many),
    "many-gpus-speed": ("many_gpus", speed_of_many),
    "many-gpus-quality": ("many_gpus", quality_of_many),
    "commands": ("commands", commands),
    "hnet-quality": ("hnet_quality", chunked_quality),
}
"""Benchmark and function of each table, by its name in a document."""


def documents() -> list[Path]:
    """List what may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_tables(text: str) -> str:
    """Write every marked table of a document anew.

    Raises:
        KeyError: there is no such table.
    """

    def write(found: re.Match) -> str:
        file, table = TABLES[found[2]]
        return found[1] + table(load(file)) + found[3]

    return MARKED.sub(write, text)


def main() -> None:
    """Add new results, and write the tables of all documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("--take", type=Path, metavar="DIR", help="add the JSON files of a folder")
    args = parser.parse_args()
    if args.take:
        for name in KEYS:
            runs = load(name, args.take)
            if runs:
                add_runs(name, runs)
                print(f"{name}: {sum(len(run['rows']) for run in runs)} rows", file=sys.stderr)
    for path in documents():
        text = path.read_text()
        path.write_text(with_tables(text))


if __name__ == "__main__":
    main()
