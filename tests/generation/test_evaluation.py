"""Every byte of a text but the first is counted exactly once, with the context it is promised."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.data.opening import open_text
from arbcli.data.text import Text
from arbcli.generation import evaluation
from arbcli.generation.evaluation import evaluate, mean_loss, windows
from arbcli.model.language_model import LanguageModel

CTX = 12


class Fake(nn.Module):
    """Whose loss of a byte says which byte of the text it is: byte b costs about b nats."""

    config = preset("tiny", dim=4, layers=1, heads=1, ffn=4, ctx=CTX)
    device = torch.device("cpu")
    compute_dtype, cache_format = torch.float32, LanguageModel.cache_format
    tokenizer, scores_in_chunks = None, False
    position_losses, _symbol_losses = LanguageModel.position_losses, LanguageModel._symbol_losses
    cached_as, cache_dtype = LanguageModel.cached_as, LanguageModel.cache_dtype

    def __init__(self) -> None:
        super().__init__()
        self.batches = []

    def _hidden(self, ids):
        return ids

    def logits(self, ids):
        return self(ids)

    def forward(self, ids):
        self.batches.append(tuple(ids.shape))
        return -torch.arange(256.0).expand(*ids.shape, 256)


def make_text(tmp_path, content: bytes) -> Text:
    path = tmp_path / "text"
    path.write_bytes(content)
    return Text([path])


@pytest.mark.parametrize("num_bytes", [2, 3, 11, 12, 13, 14, 24, 25, 37, 99, 256])
@pytest.mark.parametrize(("stride", "batch"), [(1, 3), (5, 2), (6, 4), (7, 100), (11, 3), (12, 1)])
def test_mean_loss_counts_every_byte_but_the_first_once(num_bytes, stride, batch, tmp_path):
    """A byte that was left out or counted twice would move the sum by its own value."""
    for start, counted in windows(num_bytes, CTX, stride):
        assert 0 <= start <= max(0, num_bytes - 1 - CTX)
        assert counted <= (stride if start else CTX)  # the others are context
    text, model, told = make_text(tmp_path, bytes(range(num_bytes))), Fake(), []
    loss = mean_loss(
        model, text, stride=stride, batch=batch, progress=lambda *news: told.append(news)
    )
    log_sum = float(torch.logsumexp(-torch.arange(256.0, dtype=torch.float64), 0))
    expected = sum(range(1, num_bytes)) / (num_bytes - 1) + log_sum
    assert loss == pytest.approx(expected, rel=1e-6)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (num_bytes - 1, loss)
    assert max(rows for rows, _ in model.batches) <= batch


def test_report_has_bits_ratio_and_entropy(tmp_path, monkeypatch):
    make_text(tmp_path, bytes(64) + bytes(range(1, 3)) * 32)
    clock = SimpleNamespace(perf_counter=iter([5.0, 7.5]).__next__)
    monkeypatch.setattr(evaluation, "time", clock)
    options = {"batch": 4, "backend": "torch", "stride": None}
    report = evaluate(Fake(), "a run", *open_text([str(tmp_path / "text")]), **options)
    assert (report.bytes, report.context, report.stride) == (128, CTX, CTX // 2)
    assert report.bits_per_byte == pytest.approx(report.nats_per_byte / 0.6931472)
    bits = 8 + 127 * report.bits_per_byte
    assert report.compression_ratio == pytest.approx(128 * 8 / bits)
    assert report.entropy == pytest.approx(1.0397208)
    assert (report.seconds, report.bytes_per_second) == (2.5, 128 / 2.5)
    assert (report.checkpoint, report.kv) == ("a run", "fp32")
    assert report.text == open_text([str(tmp_path / "text")])[1] != "a run"


@pytest.mark.parametrize(("near", "parts"), [
    (1024, [(0, 11)]), (12, [(0, 11)]), (11, [(0, 10), (11, 11)]), (4, [(0, 3), (4, 7), (8, 11)]),
    (3, [(0, 2), (3, 5), (6, 11)]),
])  # fmt: skip
def test_parts_of_windows_have_the_mean_loss_of_their_positions(near, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "FIRST_BUCKET", near)
    make_text(tmp_path, bytes(range(40)))
    options = {"batch": 2, "backend": "torch", "stride": 7}
    asked = mock.Mock(side_effect=evaluation.mean_loss)
    monkeypatch.setattr(evaluation, "mean_loss", asked)
    report = evaluate(Fake(), "", *open_text([str(tmp_path / "text")]), **options)
    assert asked.call_args.kwargs["sums"].dtype == torch.float64  # of a text of any length
    starts = [start for start, _ in windows(40, CTX, 7)]
    assert len(starts) == 5
    log_sum = float(torch.logsumexp(-torch.arange(256.0, dtype=torch.float64), 0))
    assert [(part.first, part.last) for part in report.by_position] == parts
    for part in report.by_position:
        costs = [s + p + 1 for s in starts for p in range(part.first, part.last + 1)]
        assert part.nats_per_byte == pytest.approx(sum(costs) / len(costs) + log_sum)


@pytest.mark.parametrize(("positions", "rows"), [(3 * CTX, 3), (1, 1), (2**15, 16)])
def test_fewer_long_windows_are_evaluated_at_once(positions, rows, tmp_path, monkeypatch):
    """And progress is in bytes for all symbols."""
    monkeypatch.setattr(evaluation, "MAX_BATCH_POSITIONS", positions)
    monkeypatch.setattr(Text, "symbol_bytes", 2.0)
    model, text, told = Fake(), make_text(tmp_path, bytes(range(251))), []
    about = {"stride": CTX, "batch": None, "backend": "torch"}
    report = evaluate(model, "", text, "", progress=lambda *news: told.append(news), **about)
    assert max(batch for batch, _ in model.batches) == rows
    assert told[-1] == (500, 500, report.nats_per_byte)


@pytest.mark.parametrize(("content", "stride", "message"), [
    (b"0123456789abcdef", 13, "`--stride` is 13"), (b"x", 6, "a text of one byte"),
])  # fmt: skip
def test_short_texts_and_long_strides_are_refused(content, stride, message, tmp_path):
    with pytest.raises(ArbError, match=message):
        evaluate(
            Fake(), "", make_text(tmp_path, content), "", batch=4, backend="torch", stride=stride
        )


def test_logits_are_compared_in_float32_whatever_computed_them(tmp_path):
    class Coarse(Fake):
        def forward(self, ids):
            return (torch.arange(256.0).expand(*ids.shape, 256) / 100).bfloat16()

    logits = Coarse()(torch.zeros(1, 1))[0, 0].double()
    expected = float((torch.logsumexp(logits, 0) - logits[1:25]).mean())
    loss = mean_loss(Coarse(), make_text(tmp_path, bytes(range(25))), stride=6, batch=2)
    assert loss == pytest.approx(expected, rel=1e-6)
