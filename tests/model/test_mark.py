"""States that are marked and rewound, against states that never read what was taken back."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cells import FEW, Cell, each_cell, wide
from marks import mostly_slow

from arbcli.config.model import ModelConfig
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model import state as state_module
from arbcli.model.build import build_model
from arbcli.model.cache import BatchCache, Cache
from arbcli.model.language_model import LanguageModel
from arbcli.model.mark import Mark

POSITIONS = 40
BEFORE = 6
ROUNDS = ((4, 2), (1, 0), (3, 3), (8, 3), (7, 1), (5, 4), (2, 0), (6, 5))
"""Bytes that are read after a mark, and accepted: round rings, over ends of entries and chunks."""


def model(config) -> LanguageModel:
    with torch.device("cpu"):
        lm = build_model(config, torch.float32)
    lm.initialise(0)
    return lm


def text(length: int, seed: int, texts: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([*b" etaoins"])[torch.randint(8, (texts, length), generator=generator)]


@torch.no_grad()
def read(lm: LanguageModel, cache: Cache | BatchCache, ids: torch.Tensor) -> torch.Tensor:
    """Read bytes one after another: logits."""
    if not ids.shape[1]:
        return torch.empty(0)
    with use_backend("torch"):
        return torch.cat([lm(part, cache) for part in ids.split(1, dim=1)], dim=1)


def kept(cache: Cache | BatchCache) -> Iterator[torch.Tensor]:
    """Copy all tensors of a cache."""
    for track in cache.tracks:
        yield track.position.clone()
        for state in track.blocks:
            yield from (part.clone() for part in (state.tensors() if state else ()))
    for stage in cache.stages:
        yield from (part.tensor.clone() for part in stage.written())
    if cache.history is not None:
        yield cache.history.clone()


def equal(some, others) -> bool:
    pairs = zip(some, others, strict=True)  # of bytes, as torch compares no e4m3
    return all(torch.equal(*(part.flatten().view(torch.uint8) for part in pair)) for pair in pairs)


def rewinds(lm: LanguageModel, rounds: tuple = ROUNDS) -> bool:
    """Return whether nothing is left of what is read after marks and not accepted."""
    cache, other = lm.new_cache(POSITIONS), lm.new_cache(POSITIONS)
    for each in (cache, other):
        read(lm, each, text(BEFORE, 0))
    for seed, (length, accepted) in enumerate(rounds, 1):
        proposed = text(length, seed)
        cache.mark(length)
        read(lm, cache, proposed)
        cache.rewind(accepted)
        read(lm, other, proposed[:, :accepted])
        if not equal(kept(cache), kept(other)):
            return False
    after = text(2, 0)
    return torch.equal(read(lm, cache, after), read(lm, other, after))


@each_cell(quick=FEW[1:4])
def test_nothing_is_left_of_bytes_that_were_taken_back(cell):
    lm = model(cell.model())
    with lm.prepared_weights(2**20):
        assert rewinds(lm)


@pytest.mark.parametrize(
    ("mixer", "kv"),
    mostly_slow(
        [
            (mixer, kv)
            for mixer in ("attention", "latent", "compressed")
            for kv in ("fp8", "int8-mixed")
        ],
        lambda mixer, kv: (mixer == "compressed") == (kv == "fp8"),
    ),
)
def test_nothing_is_left_of_them_in_eight_bits(mixer, kv):
    lm = model(Cell(mixer, "none", 1, "plain").model())
    with lm.cached_as(kv):
        assert rewinds(lm)


def spaces() -> ModelConfig:
    """Assemble a model whose chunks begin after spaces."""
    config = Cell("none", "mlp", 1, "chunked").model()
    outer, main = config.stages
    outer = replace(outer, chunking=replace(outer.chunking, boundaries="space"))
    return replace(config, stages=(outer, main))


@pytest.mark.slow
def test_nothing_is_left_of_chunks_at_spaces():
    assert rewinds(model(spaces()))


FORGETTING = {
    "attention": Cell("attention", "none", 1, "plain").model(),
    "history": Cell("none", "experts", 1, "plain").model(),
    "latent": Cell("latent", "none", 1, "plain").model(),
    "compressed": Cell("compressed", "none", 1, "plain").model(),
    "mamba": Cell("mamba", "none", 1, "plain").model(),
    "chunks": Cell("none", "mlp", 1, "chunked").model(),
    "spaces": spaces(),
}


@pytest.mark.parametrize(
    "name", mostly_slow(FORGETTING, lambda name: name in ("history", "mamba", "chunks"))
)
def test_every_tensor_that_a_mark_leaves_out_is_missed(name, monkeypatch):
    lm, seen, rounds = model(FORGETTING[name]), [], ((8, 3),)

    class Forgetful(Mark):
        left_out = -1

        def __init__(self, position, written, positions) -> None:
            written = [*written]
            left_out = self.left_out - len(seen)
            seen.extend(written)
            written = [part for index, part in enumerate(written) if index != left_out]
            super().__init__(position, written, positions)

    monkeypatch.setattr(state_module, "Mark", Forgetful)
    assert rewinds(lm, rounds)
    for index in range(len(seen)):
        Forgetful.left_out = index
        seen.clear()
        assert not rewinds(lm, rounds), index
    assert seen


def test_positions_that_a_mark_does_not_set_back_are_missed(monkeypatch):
    lm = model(FORGETTING["chunks"])
    monkeypatch.setattr(Mark, "_count_back", lambda *_: None)
    assert not rewinds(lm)


@pytest.mark.parametrize("mixer", ["attention", "latent", "mamba"])
def test_bytes_that_are_read_at_once_leave_nothing(mixer):
    """Both read as many: the last bits of a product may depend on the number of its rows."""
    lm = model(Cell(mixer, "mlp", 1, "plain").model())
    there, proposed = text(9, 1), text(5, 2)
    others = torch.cat((proposed[:, :2], proposed[:, 2:] ^ 1), dim=1)
    found = []
    for ids in (proposed, others):
        cache = lm.new_cache(POSITIONS)
        read(lm, cache, there)
        cache.mark(5)
        with use_backend("torch"), torch.no_grad():
            logits = lm(ids, cache)
        cache.rewind(torch.tensor(2))
        assert cache.reads_at_once == (mixer != "mamba")
        found.append([*kept(cache), logits[:, :2], read(lm, cache, text(3, 3))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    cache = lm.new_cache(POSITIONS)
    read(lm, cache, torch.cat((there, proposed[:, :2]), dim=1))
    for mine, other in zip(found[0], kept(cache), strict=False):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@each_cell(quick=[FEW[0], *FEW[2:]])
@torch.no_grad()
def test_several_texts_take_back_as_many_as_each_likes(cell):
    """Each gives afterwards what it would have given: the same bits."""
    lm = model(wide(cell.model()))
    cache, other = (BatchCache(lm, 3, POSITIONS) for _ in range(2))
    steps, accepted = torch.tensor([3, 4, 2]), torch.tensor([1, 4, 2])
    there, proposed, after = (text(length, length, 3) for length in (3, 4, 5))

    def step(several: BatchCache, ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        several.active.copy_(active)
        return lm(ids[:, None], several)

    with lm.prepared_weights():
        for ids in there.unbind(1):
            for each in (cache, other):
                step(each, ids, torch.ones(3))
        cache.mark(4)
        for index, ids in enumerate(proposed.unbind(1)):
            step(cache, ids, index < steps)
            step(other, ids, index < accepted)
        assert cache.position.tolist() == [6, 7, 5]
        cache.rewind(accepted)
        assert cache.position.tolist() == other.position.tolist() == [4, 7, 5]
        for ids in after.unbind(1):
            assert torch.equal(*(step(each, ids, torch.ones(3)) for each in (cache, other)))
    if cell.place == "plain":
        # not before: a step of a text that is left alone writes where its next position will
        assert equal(kept(cache), kept(other))


def test_mark_is_counted_and_used_again():
    lm = model(Cell("mamba", "none", 1, "plain").model())
    cache = lm.new_cache(POSITIONS)
    before = cache.nbytes
    cache.mark(3)
    state, ring = (part.nbytes for part in cache.main.blocks[0].tensors())
    assert cache.nbytes == before + 3 * (2 * (state + ring // 4) + 4)
    saved = cache._marks[0]._saved
    cache.rewind(0)
    cache.mark(3)
    assert cache._marks[0]._saved is saved


def test_mistakes_are_named():
    lm = model(Cell("attention", "none", 1, "plain").model())
    cache = lm.new_cache(POSITIONS)
    with pytest.raises(ValueError, match="call `mark` first"):
        cache.rewind(0)
    cache.mark(2)
    read(lm, cache, text(2, 0))
    with pytest.raises(ValueError, match="no more than 2 positions"):
        read(lm, cache, text(1, 0))
    with pytest.raises(ValueError, match="3 of 2 positions cannot be accepted"):
        cache.rewind(3)
