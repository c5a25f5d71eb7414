"""Several processes that share one selection of tests; a script.

    python tests/apparatus/shared.py PROCESSES RESULTS [arguments of pytest]

Most tests of a GPU wait for a host that compiles, so many of them share one. RESULTS is a file of
JSON lines, one for each test, written as it ends: a run that is cut off has those of its tests that
ran. Every process collects all tests, in one order, and takes the next that no other has taken.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


class Sharer:
    """Runs the tests that no other process has taken.

    Args:
        taken: folder with an empty file for each test that was taken, by its place.
        results: file to which a line is appended for each test that ran.
    """

    def __init__(self, taken: Path, results: Path) -> None:
        self.taken, self.results = taken, results

    def _take(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        for place, item in enumerate(items):
            try:
                (self.taken / str(place)).touch(exist_ok=False)
            except FileExistsError:
                continue
            yield item

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mine = self._take(session.items)
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            if report.failed:
                row["said"] = report.longreprtext[-3000:]
            with self.results.open("a") as file:
                file.write(json.dumps(row) + "\n")


def summarise(results: Path) -> int:
    """Print the numbers of passed, failed and skipped tests, and the failed ones; count these."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    failed = [row for row in rows if row["outcome"] == "failed"]
    for row in failed:
        last = row["said"].strip().splitlines()[-1:] or [""]
        sys.stdout.write(f"FAILED {row['test']}: {last[0][:200]}\n")
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:10]
    for row in slowest:
        sys.stdout.write(f"{row['seconds']:7.1f} s {row['test']}\n")
    sys.stdout.write(f"{dict(Counter(row['outcome'] for row in rows))}\n")
    return len(failed)


def main(processes: str, results: str, *arguments: str) -> int:
    """Run tests in so many processes; return an exit code."""
    path, began = Path(results), time.monotonic()
    path.touch()
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--take", folder, results, *arguments]
        started = []
        for number in range(int(processes)):
            with Path(f"{results}.{number}.log").open("w") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait() for process in started]
        except KeyboardInterrupt:
            for process in started:
                process.kill()
            codes = ["stopped"]
    failed = summarise(path)
    sys.stdout.write(f"{time.monotonic() - began:.0f} s, exit codes {codes}\n")
    return int(failed > 0 or any(codes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--take"]:
        taken, results = map(Path, sys.argv[2:4])
        options = ["-q", "-p", "no:cacheprovider", *sys.argv[4:]]
        sys.exit(pytest.main(options, [Sharer(taken, results)]))
    sys.exit(main(*sys.argv[1:]))
