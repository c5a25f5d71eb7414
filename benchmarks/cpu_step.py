"""Time a training step of `tiny` on the CPU beside its float twin, in turns: `make bench`."""

import statistics
import time

from arbcli.data import open_texts
from arbcli.train.configure import new_config
from arbcli.train.trainer import Trainer

ROUNDS, STEPS = 7, 4
KINDS = {
    "moment, factored": {"direction": "factored"},
    "moment, orthogonal": {},
    "nibble, factored": {"rule": "nibble"},
    "float, AdamW": {"weights": "float"},
}


def main() -> None:
    """Print a line a kind, with its speed against the twin's."""
    texts = open_texts(None, None, seed=0, context=64)
    trainers = {
        name: Trainer(new_config(ctx=64, device="cpu", steps=1000, **options), texts)
        for name, options in KINDS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(1 + ROUNDS):  # the first warms up
        for name, trainer in trainers.items():
            started = time.perf_counter()
            for _ in range(STEPS):
                trainer.train_step()
            times[name].append((time.perf_counter() - started) / STEPS)
    twin = times["float, AdamW"][1:]
    for name, found in times.items():
        ratio = statistics.median(b / a for a, b in zip(found[1:], twin, strict=True))
        print(f"{name:20} {1e3 * statistics.median(found[1:]):7.1f} ms, {ratio:.2f} x the twin")


if __name__ == "__main__":
    main()
