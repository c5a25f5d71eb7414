"""The gain of a moment, which the backends compute by the same operations."""

import numpy as np
import torch

from arbcli.kernels.update.step_trits import moment_gain


def test_gain_of_a_moment_is_of_correctly_rounded_operations():
    """So is what a GPU computes; torch's own root in float32 is not, on some CPUs."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        squares, weights, step = (int(draw.integers(1, 2**most)) for most in (36, 24, 44))
        size = np.float32(step) * np.float32(2**-16)
        gain = size / np.sqrt(np.float32(squares) / np.float32(weights))
        wanted = np.floor(min(gain, np.float32(2**23)) + np.float32(0.5))
        assert moment_gain(torch.tensor(step), torch.tensor(squares), weights) == int(wanted)
