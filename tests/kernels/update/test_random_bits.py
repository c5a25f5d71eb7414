"""The generator: the same words everywhere, and none favoured."""

import torch

from arbcli.kernels.update.random_bits import (
    mix,
    mix_reference,
    random_bits,
    random_bits_reference,
    random_halves,
    random_halves_reference,
    stream_keys,
)


def unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF


def test_mix_is_a_bijection_of_every_16_bit_half():
    low = torch.arange(2**16, dtype=torch.int32)
    assert mix(low).unique().numel() == 2**16
    assert mix(low << 16).unique().numel() == 2**16


def test_mix_equals_the_reference_at_the_ends_of_the_range():
    words = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x9E3779B9]
    signed = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32)
    assert unsigned(mix(signed)).tolist() == [mix_reference(word) for word in words]


def test_random_bits_equal_the_reference():
    for key in (0, -1, 123456789, -(2**31)):
        got = random_bits(
            torch.tensor(key, dtype=torch.int32),
            torch.arange(7, dtype=torch.int32),
            torch.arange(41, dtype=torch.int32),
        )
        assert torch.equal(unsigned(got), random_bits_reference(key, 7, 41))


def test_two_rows_share_the_words_of_a_pair():
    key, columns = torch.tensor(-9, dtype=torch.int32), torch.arange(41, dtype=torch.int32)
    words = random_bits_reference(-9, 4, 41)
    for rows in (slice(0, 7), slice(2, 5), slice(4, 8)):
        halves = random_halves(key, rows, columns)
        assert torch.equal(halves.long(), random_halves_reference(-9, 8, 41)[rows])
        for n, row in zip(range(rows.start, rows.stop), halves, strict=True):
            assert torch.equal(row.long(), words[n // 2] // 2 ** (16 * (n % 2)) % 2**16)


def keys(seed: int, tick: int) -> torch.Tensor:
    words = (torch.tensor(word, dtype=torch.int32) for word in (seed, tick))
    return stream_keys(*words, num_tensors=50, num_streams=5)


def test_stream_keys_of_a_run_are_never_used_twice():
    assert torch.stack([keys(0, tick) for tick in range(400)]).unique().numel() == 400 * 50 * 5


def test_stream_keys_differ_by_seed():
    assert not set(keys(0, 7).flatten().tolist()) & set(keys(1, 7).flatten().tolist())


def test_every_bit_is_set_half_of_the_time():
    rows, columns = torch.arange(512, dtype=torch.int32), torch.arange(512, dtype=torch.int32)
    words = random_bits(torch.tensor(42, dtype=torch.int32), rows, columns)
    for bit in range(32):
        share = (words >> bit & 1).float().mean().item()
        assert abs(share - 0.5) < 0.005, bit


def test_neighbours_are_uncorrelated():
    rows, columns = torch.arange(512, dtype=torch.int32), torch.arange(513, dtype=torch.int32)
    words = (random_bits(torch.tensor(1, dtype=torch.int32), rows, columns) & 0xFFFF).double()
    words = words / 2**16 - 0.5
    assert abs((words[:, 1:] * words[:, :-1]).mean().item() * 12) < 0.01
    assert abs((words[1:] * words[:-1]).mean().item() * 12) < 0.01
