"""Write the tables of README.md and `docs/` from `benchmarks/results/`.

    python -m benchmarks.tables [--take DIR]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is in `TABLES` of the module
of that page. `--take` first adds the files of a folder, as a benchmark on another machine wrote
them.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.results import KEYS, add_runs, load
from benchmarks.tables.pages import paths, with_tables


def main() -> None:
    """Add new results, and write the tables of all pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("--take", type=Path, metavar="DIR", help="add the JSON files of a folder")
    args = parser.parse_args()
    if args.take:
        for name in KEYS:
            runs = load(name, args.take)
            if runs:
                add_runs(name, runs)
                print(f"{name}: {sum(len(run['rows']) for run in runs)} rows", file=sys.stderr)
    for path in paths():
        path.write_text(with_tables(path))


if __name__ == "__main__":
    main()
