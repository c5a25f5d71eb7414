"""Tables of `docs/performance.md`."""

from statistics import median

from benchmarks.tables.cells import MIB, markdown, measured, number, share, source
from benchmarks.tables.rows import Row, Runs, Tables, measured_row, row_of, rows_of, value
from benchmarks.tables.steps import PRESETS, faster, speed_ratio


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
    head = ["", "compute", "a step", "speed / baseline", "speed / compiled baseline"]
    return markdown(head, lines) + source(runs)


def text_on_a_cpu(runs: Runs) -> str:
    """Bytes of text a second on a CPU, and of a prompt, against llama.cpp."""
    pairs: dict[tuple, dict[str, Row]] = {}
    for row in rows_of(runs):
        key = row["preset"], row["digits"], row["task"], row["level"]
        pairs.setdefault(key, {})[row["program"]] = row
    lines = []
    for (preset, digits, task, level), programs in sorted(pairs.items()):
        ours, peer = (programs[name] for name in ("arb", "llama.cpp"))
        unit = "bytes_per_second"
        rates = zip(*(row[f"rounds_{unit}"] for row in (ours, peer)), strict=True)
        speeds = [f"{row[unit]:,.1f} bytes/s" for row in (ours, peer)]
        ratio = median(mine / theirs for mine, theirs in rates)
        has = "AVX2" if level == "x86-64-v3" else "all"
        lines.append([f"`{preset}`, {digits}", task, has, *speeds, f"{ratio:.2f}"])
    head = ["", "", "instructions", "`arb`", "llama.cpp", "ratio"]
    return markdown(head, lines) + source(runs)


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
        bare = f"{twin}, bare"
        for own, how, other in (
            (ours, title, bare),
            (f"{ours}, no sub-norms", f"{title}, no sub-norms,", bare),
        ):
            pairs = [
                [row_of(runs, preset=preset, kind=kind) for kind in (own, other)]
                for preset in PRESETS
            ]
            cells = [number(speed_ratio(runs, *pair), ".2f") for pair in pairs]
            lines.append([f"speed, {how} against {other}", *cells])
    for ours, twin in (("factored", "AdamW"), ("orthogonal", "Muon")):
        for field in ("allocated_bytes", "reserved_bytes"):
            cells = []
            for preset in PRESETS:
                mine = row_of(runs, preset=preset, kind=ours)
                peer = faster(runs, mine, twin)
                if mine and peer and field in mine and field in peer:
                    cells.append(f"{mine[field] / peer[field]:.2f}")
                else:
                    cells.append("")
            how = field.removesuffix("_bytes")
            lines.append([f"peak {how}, {ours} against the faster {twin}", *cells])
    filled = [line for line in lines if any(line[1:])]
    return markdown(["", *(f"`{preset}`" for preset in PRESETS)], filled) + source(runs)


def steps(runs: Runs) -> str:
    """Training steps of ours and of the bare baselines."""
    lines = []
    for preset in PRESETS:
        for row in rows_of(runs, preset=preset):
            if row["kind"].removesuffix(", no sub-norms") in ("AdamW", "Muon"):
                continue
            memory = [row.get(name) for name in ("allocated_bytes", "reserved_bytes")]
            lines.append(
                [
                    f"`{preset}`",
                    row["kind"],
                    f"{row['ms']:,.2f}",
                    f"{row['bytes_per_second']:,}",
                    *(number(value and value / MIB, ",.0f") for value in memory),
                    number(row.get("sm_mhz"), ".0f"),
                ]
            )
    head = ["preset", "step", "ms", "bytes/s", "MiB allocated", "MiB reserved", "GPU MHz"]
    return markdown(head, lines) + source(runs)


def peaks(runs: Runs) -> str:
    """MiB of training steps in processes of their own, and shares of the baselines'."""
    lines = []
    for row in rows_of(runs):
        twins = ("AdamW, no sub-norms", "AdamW, bare")
        twin_rows = [row_of(runs, preset=row["preset"], kind=kind) for kind in twins]
        shares = [
            row["allocated_bytes"] / twin["allocated_bytes"] if twin else None for twin in twin_rows
        ]
        size, predicted = row["allocated_bytes"], row["predicted_bytes"]
        lines.append(
            [
                f"`{row['preset']}`, {row['kind']}",
                f"{size / MIB:,.0f}",
                number(predicted and predicted / MIB, ",.0f"),
                *(number(ratio, ".3f") for ratio in shares),
                f"{row['reserved_bytes'] / MIB:,.0f}",
            ]
        )
    head = ["step", "MiB", "predicted", "MiB / AdamW", "MiB / bare AdamW", "MiB reserved"]
    return measured(head, lines, runs)


def products(runs: Runs) -> str:
    """Products and updates as multiples of cuBLAS's speed."""

    def ratio(size: str, rows: int, what: str, form: str) -> str:
        row = row_of(runs, size=size, rows=rows, what=what)
        return number(value(row, "ratio"), form)

    large, square = (4096, 8192, 16384), "8192x8192"
    lines = []
    for what, title, form in (
        ("forward", "8192 x 8192 forward, unpacking included", ".3f"),
        ("grad_x", "its gradient of x", ".3f"),
        ("forward in fp8", "`--compute fp8`, forward", ".2f"),
        ("grad_x in fp8", "`--compute fp8`, gradient of x", ".2f"),
    ):
        lines.append([title, *(ratio(square, rows, what, form) for rows in large)])
    text = markdown(["large products", "M = 4096", "8192", "16384"], lines)
    few, lines = (1, 2, 4, 8), []
    for size, count in (("16384x16384", "eight"), (square, "31")):
        for what, title in (
            ("prepacked", "one alone, its launch included"),
            ("prepacked, in a row", f"each of {count} in a row, as a generated byte has them"),
        ):
            measurements = [row_of(runs, size=size, rows=rows, what=what) for rows in few]
            title = f"{size.replace('x', ' x ')}, {title}"
            lines.append([title, *(number(value(row, "ratio"), ".2f") for row in measurements)])
            shares = [share(value(row, "copy_share")) for row in measurements]
            lines.append(["as a share of the copy bandwidth", *shares])
    filled = [line for line in lines if any(line[1:])]
    text += "\n" + markdown(["prepacked for generation", "M = 1", "2", "4", "8"], filled)
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
        peer = measured_row(runs, preset=name, prompt_bytes=prompt, kind="float bf16")
        rate, twin = ours["bytes_per_second"], peer["bytes_per_second"]
        lines.append(
            [
                f"`{name}`, after {prompt:,} byte{'s' * (prompt > 1)}",
                f"{rate:,.0f} bytes/s",
                f"{twin:,.0f} bytes/s",
                f"{rate / twin:.2f}",
                f"{share(peer['copy_share'])} ({peer['mode']})",
            ]
        )
    head = ["", "`arb`", "float in bf16", "ratio", "its weights, share of the copy bandwidth"]
    return markdown(head, lines) + source(runs)


def several(runs: Runs) -> str:
    """Bytes a second of several texts at once, against the float decoder's."""
    lines = []
    for ours in rows_of(runs, kind="moment"):
        peer = measured_row(runs, preset=ours["preset"], batch=ours["batch"], kind="float bf16")
        rate, twin = ours["bytes_per_second"], peer["bytes_per_second"]
        subject = [f"`{ours['preset']}`", str(ours["batch"])]
        lines.append([*subject, f"{rate:,.0f}", f"{twin:,.0f}", f"{rate / twin:.2f}"])
    return markdown(["", "texts", "`arb`", "float in bf16", "ratio"], lines) + source(runs)


def families(runs: Runs) -> str:
    """Speed and peak of a step of other families against plain PyTorch."""
    lines = []
    for family in dict.fromkeys(row["preset"] for row in rows_of(runs)):
        for ours, peer in (("factored", "AdamW"), ("orthogonal", "Muon")):
            kinds = ours, *(f"{peer}, bare{way}" for way in ("", ", flex", ", tuned"))
            mine, *plain = (row_of(runs, preset=family, kind=kind) for kind in kinds)
            known = [row for row in plain if row]
            if not (mine and known):
                continue
            bare = min(known, key=lambda row: row["ms"])
            rates = (f"{row['bytes_per_second']:,}" for row in (mine, bare))
            lines.append(
                [
                    f"`{family}`",
                    f"{ours} against {peer}",
                    *rates,
                    number(speed_ratio(runs, mine, bare), ".2f"),
                    f"{mine['allocated_bytes'] / bare['allocated_bytes']:.2f}",
                ]
            )
    head = ["model", "step", "`arb`, bytes/s", "plain PyTorch, bytes/s", "ratio"]
    head += ["peak allocated, ratio"]
    return measured(head, lines, runs)


def step_budget(runs: Runs) -> str:
    """Milliseconds of a training step by kind of kernel, and the least that each could take."""
    rows = rows_of(runs)
    kinds = dict.fromkeys(kind for row in rows for kind in row["kinds"])
    lines = []
    for kind in kinds:
        times = [row["kinds"][kind] for row in rows]
        lines.append([kind, *(f"{f['ms']:.2f}, {f['floor_ms']:.2f}" for f in times)])
    totals = [[row["kinds"][kind] for kind in kinds] for row in rows]
    sums = [[sum(f[name] for f in times) for name in ("ms", "floor_ms")] for times in totals]
    lines.append(["all kernels", *(f"{ms:.2f}, {floor:.2f}" for ms, floor in sums)])
    lines.append(["a captured step", *(f"{row['step_ms']:.2f}" for row in rows)])
    head = ["ms, and at the machine's rates", *(f"`{row['model']}`" for row in rows)]
    return measured(head, lines, runs)


TABLES: Tables = {
    "ratios": ("training_step", ratios),
    "steps": ("training_step", steps),
    "families": ("families", families),
    "step-budget": ("step_budget", step_budget),
    "peaks": ("peaks", peaks),
    "products": ("products", products),
    "generation": ("generation", generation),
    "several-texts": ("several_texts", several),
    "cpu-step": ("cpu_step", steps_on_a_cpu),
    "cpu-text": ("cpu_text", text_on_a_cpu),
}
