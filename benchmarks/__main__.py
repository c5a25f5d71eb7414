"""Run all benchmarks that this machine can: `make bench`."""

import subprocess
import sys

import torch

GPU = ("products", "training_step", "generation", "arb_3b")
CPU = ("cpu_step",)


def main() -> None:
    """Run each in a process of its own, so that none inherits another's memory or clocks."""
    for name in GPU if torch.cuda.is_available() else CPU:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
