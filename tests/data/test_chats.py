"""Chats as documents: what is learnt, how windows are filled, and that documents stay apart."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.data.chat_template import ChatTemplate
from arbcli.data.chats import NOT_LEARNT, Chats, open_documents, pack
from arbcli.data.conversion import texts_folder
from arbcli.data.files import DOCUMENTS
from arbcli.data.opening import open_text
from arbcli.data.text import Text, Texts
from arbcli.data.tokens import Tokenizer
from arbcli.generation.conversation import Conversation
from arbcli.generation.evaluation import document_loss
from arbcli.model.build import build_model
from arbcli.training.text_warnings import text_warnings
from tests.data.test_chat_template import CHATML

pytestmark = pytest.mark.usefixtures("own_cache")

SPECIAL = {"bos_token": "", "eos_token": "<|im_end|>"}
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}"
    "<think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(*contents: str) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, byte_tokenizer):
    pytest.importorskip("jinja2", reason="needs the package jinja2")
    path = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(byte_tokenizer, path)
    (path / "chat_template.jinja").write_text(CHATML)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return path


@pytest.fixture
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.read(folder / "tokenizer.json")


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chats(tmp_path, tokenizer, records, source=CHATML, context=64, field="messages"):
    template = ChatTemplate(source, "it", SPECIAL)
    text = Text([write_records(tmp_path / "chats.jsonl", records)])
    return Chats(text, field, tokenizer, template, context)


def documents_of(dataset: Chats) -> list[tuple[list[int], list[int]]]:
    """List inputs and targets of every document."""
    listed = []
    for window in range(len(dataset.bins)):
        ids, targets, numbers = (part[0] for part in dataset.packed_batch([window]))
        for number in range(len(dataset.bins[window])):
            here = numbers == number
            listed.append((ids[here].tolist(), targets[here].tolist()))
        assert targets[numbers == len(dataset.bins[window])].eq(NOT_LEARNT).all()
    return listed


def learnt_texts(dataset: Chats, tokenizer: Tokenizer) -> list[str]:
    return [
        tokenizer.decode([token for token in targets if token != NOT_LEARNT])
        for _, targets in documents_of(dataset)
    ]


def test_only_answers_and_their_ends_are_learnt(tmp_path, tokenizer):
    record = chat("how are you", "fine", "you", "am fine too")
    dataset = chats(tmp_path, tokenizer, [record])
    ((ids, targets),) = documents_of(dataset)
    whole = tokenizer.decode([*ids, targets[-1]])
    assert whole == ChatTemplate(CHATML, "", SPECIAL).render(record["messages"])
    assert learnt_texts(dataset, tokenizer) == ["fine<|im_end|>\nam fine too<|im_end|>\n"]
    assert dataset.learnt_bytes == len(b"fine<|im_end|>\nam fine too<|im_end|>\n")
    assert ids[0] == tokenizer.special("<|im_start|>")  # one token, not ten of its text
    # each target is the next input
    pairs = zip(ids[1:], targets[:-1], strict=True)
    assert all(target in (NOT_LEARNT, following) for following, target in pairs)


def test_template_that_alters_earlier_answers_makes_a_document_of_each(tmp_path, tokenizer):
    dataset = chats(tmp_path, tokenizer, [chat("a", "b", "c", "d")], THINKING)
    assert sorted(learnt_texts(dataset, tokenizer)) == ["<think>b<|im_end|>", "<think>d<|im_end|>"]


def test_documents_are_kept_for_all_that_makes_them(tmp_path, tokenizer):
    """One file of the cache for each field, tokenizer and template, and for its special tokens."""
    records = [chat("how", "fine") | {"question": "how", "answer": "you are", "text": "I am"}]
    other = json.loads(tokenizer.content)
    other["added_tokens"][0]["lstrip"] = True  # does nothing here
    other = Tokenizer(json.dumps(other).encode(), "other")
    template = {"source": CHATML, "tokens": SPECIAL}
    text = Text([write_records(tmp_path / "chats.jsonl", records)])
    for reads, field, changed in (
        (tokenizer, "messages", {}), (tokenizer, "question+answer", {}),
        (tokenizer, "text+answer", {}), (tokenizer, "+text", {}), (tokenizer, "+answer", {}),
        (other, "messages", {}), (tokenizer, "messages", {"source": "{# other #}" + CHATML}),
        (tokenizer, "messages", {"tokens": SPECIAL | {"eos_token": "<|im_start|>"}}),
    ):  # fmt: skip
        given = template | changed
        before = {*texts_folder().glob("*.sha256")}
        for _ in range(2):
            Chats(text, field, reads, ChatTemplate(given["source"], "it", given["tokens"]), 64)
        assert len({*texts_folder().glob("*.sha256")} - before) == 1, (field, changed)


@pytest.mark.parametrize(("says", "more"), [(None, set()), (5, {5}), ([5, 7], {5, 7})])
def test_conversation_ends_where_its_model_says_and_remembers(
    says, more, folder, tokenizer, tmp_path
):
    run = shutil.copytree(folder, tmp_path / "run")
    (run / COMPANIONS).mkdir()
    (run / COMPANIONS / "generation_config.json").write_text(json.dumps({"eos_token_id": says}))
    model = SimpleNamespace(tokenizer=tokenizer)
    conversation = Conversation(model, run / "step-000001.safetensors")
    assert conversation.ends == {tokenizer.special("<|im_end|>"), *more}
    conversation.ask(b"how are you")
    conversation.append_answer(b"fine")
    messages = chat("how are you", "fine", "you")["messages"]
    wanted = ChatTemplate(CHATML, "", SPECIAL).render(messages, add_generation_prompt=True)
    assert tokenizer.decode(conversation.ask(b"you")) == wanted
    path = run / "step-000001.safetensors"
    conversation = Conversation(model, path, "I am")  # which is said before each question
    for text, ask in (("you", conversation.prompt_tokens), ("how", conversation.ask)):
        wanted = f"<|im_start|>system\nI am<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        assert tokenizer.decode(ask(text.encode())) == f"{wanted}<|im_start|>assistant\n"
    with pytest.raises(ArbError, match="contains the special token"):
        Conversation(model, path, "<|im_end|>")
    conversation._template = SimpleNamespace(render=lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        conversation.ask(b"refused")
    assert [message["content"] for message in conversation.messages] == ["I am", "how"]


RECORDED = Path(__file__).with_name("damaged_chats.txt").read_text(encoding="utf-8")
"""Records with the messages of their refusals, which follow the location."""


@pytest.mark.parametrize(("record", "said"), re.findall(r"(.*)\n  (.*)\n", RECORDED))
def test_damaged_record_is_refused_by_its_place(tmp_path, tokenizer, record, said):
    with pytest.raises(ArbError) as caught:
        chats(tmp_path, tokenizer, [json.loads(record)])
    assert str(caught.value) == f"the record at byte 0 of `{tmp_path / 'chats.jsonl'}`: {said}"


def test_damaged_record_of_a_converted_file_is_in_the_file_that_was_named(tmp_path, tokenizer):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"text": "a b"}, {}]))
    with pytest.raises(ArbError, match=f"line 2 of `{path}`: its `text` is missing"):
        open_documents(open_text([str(path)], DOCUMENTS)[0], "+text", tokenizer, path, 64)


@pytest.mark.parametrize("room", [5, 17, 300])
def test_windows_hold_every_document_once(room):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, min(room, 9) + 1, (300,), generator=generator).tolist()
    bins = pack(sizes, room)
    assert sorted(index for some in bins for index in some) == list(range(300))
    assert all(sum(sizes[index] for index in some) <= room for some in bins)
    assert all(len(some) < 64 for some in bins)
    assert len(bins) <= max(-(-300 // 63), sum(sizes) // room * 1.2 + 1)


def test_long_document_is_cut(tmp_path, tokenizer):
    long = "how are you " * 9
    records = [chat("a", long), chat("b", "c"), chat(long, "d")]
    dataset = chats(tmp_path, tokenizer, records, context=24)
    assert (dataset.cut, len(documents_of(dataset))) == (2, 2)  # the answer of the third is cut off
    assert any("2 documents are longer" in w for w in text_warnings(Texts(dataset, dataset, "")))
    assert sorted(len(ids) for ids, _ in documents_of(dataset))[-1] == 24
    learnt = [t for _, targets in documents_of(dataset) for t in targets if t != NOT_LEARNT]
    assert dataset.learnt_tokens == len(learnt)
    assert dataset.learnt_bytes == len(tokenizer.decode(learnt))
    shown = [tokenizer.decode([*ids, targets[-1]]) for ids, targets in documents_of(dataset)]
    # the last token of a cut document is its last target, whether learnt or not
    assert dataset.window_bytes(range(len(dataset.bins)), 24) == sum(map(len, shown))
    assert sum(dataset.learnt_symbols([n], 24) for n in range(len(dataset.bins))) == len(learnt)
    with pytest.raises(ArbError, match="no record has an answer that begins within 4 tokens"):
        chats(tmp_path, tokenizer, [chat("how are you", "b")], context=4)
    tokenizer.beginning = [0, 1]
    with pytest.raises(ArbError, match="no record has an answer"):  # no byte is learnt
        chats(tmp_path, tokenizer, [{"text": ""}], field="+text")


@pytest.mark.parametrize(
    ("record", "learnt"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "b"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                       {"role": "assistant",
                        "content": [{"type": "text", "text": "b"}] * 2}]}, "bb"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0},
                       {"role": "user", "content": "a"},
                       {"role": "assistant", "content": "b", "weight": 1}]}, "b"),
    ],
    ids=["share gpt", "parts", "weights"],
)  # fmt: skip
def test_records_as_others_write_them(record, learnt, tmp_path, tokenizer):
    for field in ("messages", next(iter(record))):
        dataset = chats(tmp_path, tokenizer, [record], field=field)
        assert learnt_texts(dataset, tokenizer) == [f"{learnt}<|im_end|>\n"]


JOINED = (
    "{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'Assistant: ' }}{{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


def test_token_that_joins_prompt_and_answer_is_learnt(tmp_path, tokenizer):
    """The space that ends the prompt and the first word of the answer are one token."""
    joined = tokenizer.encode(b" am")
    assert len(joined) == 1
    dataset = chats(tmp_path, tokenizer, [chat("you", "am"), chat("x", "\u00e9a")], JOINED)
    learnt = [
        [token for token in targets if token != NOT_LEARNT] for _, targets in documents_of(dataset)
    ]
    assert [*joined, tokenizer.special("<|im_end|>")] in learnt
    assert sorted(map(tokenizer.decode, learnt)) == [" am<|im_end|>", "\u00e9a<|im_end|>"]
    assert dataset.learnt_bytes == len(" am<|im_end|>\u00e9a<|im_end|>".encode())


def model_of(vocabulary: int, ctx: int = 40, **mixer):
    block = BlockConfig(
        mixer=AttentionConfig(heads=4, kv_heads=2, sub_norm=False, **mixer),
        channel=MLPConfig(width=48, sub_norm=False),
    )
    stage = StageConfig(dim=32, blocks=(block,) * 2)
    config = ModelConfig(ctx=ctx, stages=(stage,), vocabulary=vocabulary, digits="all")
    return build_model(config, torch.float32, seed=3)


@pytest.mark.parametrize(
    ("vocabulary", "mixer"),
    [
        (270, {}), (270, {"query_key_norm": "gain"}), (270, {"window": 5}),
        (270, {"sink": True, "window": 6}), (5000, {"query_key_norm": "none", "bias": True}),
    ],
    ids=["unit", "gain", "window", "sink", "many symbols"],
)  # fmt: skip
def test_documents_of_a_window_know_nothing_of_each_other(vocabulary, mixer):
    model = model_of(vocabulary, **mixer)
    generator = torch.Generator().manual_seed(1)
    sizes = [(9, 14, 10), (20, 13)]
    ids = torch.randint(270, (2, 40), generator=generator)
    targets = torch.randint(270, (2, 40), generator=generator)
    targets[torch.rand(2, 40, generator=generator) < 0.5] = NOT_LEARNT
    numbers, alone, learnt = torch.zeros(2, 40, dtype=torch.int64), 0.0, 0
    for row, some in enumerate(sizes):
        at = 0
        for number, size in enumerate(some):
            here = (slice(row, row + 1), slice(at, at + size))
            numbers[here], at = number, at + size
            losses = model.position_losses(ids[here], targets[here].clamp(min=0))
            counts = targets[here] >= 0
            alone, learnt = alone + float(losses[counts].sum().detach()), learnt + int(counts.sum())
        numbers[row, at:], targets[row, at:] = len(some), NOT_LEARNT
    packed = float(model.loss(ids, targets, numbers).detach())
    assert packed == pytest.approx(alone / learnt, rel=1e-5)
    # as one text they see each other, and their loss is another
    assert packed != pytest.approx(float(model.loss(ids, targets, 0 * numbers).detach()), rel=1e-5)


def test_command_trains_on_chats_and_resumes_to_the_same_bits(
    tmp_path, folder, arb_done, arb_json, arb_error
):
    records = [chat(f"how are you {i}", f"fine {i % 3}") for i in range(60)]
    data = write_records(tmp_path / "chats.jsonl", records)
    words = ["train", "--data", str(data), "--field", "messages", "--batch", "2", "--ctx", "48"]
    words += ["--tokenizer", str(folder / "tokenizer.json"), "--dim", "32", "--layers", "1"]
    words += ["--heads", "2", "--ffn", "48", "--device", "cpu", "--compute", "fp32", "--quiet"]
    run = tmp_path / "whole"
    arb_done(*words, "--steps", "4", "--out", str(run), "--save-every", "2")
    assert (run / "hugging_face" / "chat_template.jinja").read_text() == CHATML
    wanted = (run / "step-000004.safetensors").read_bytes()
    seen = [json.loads(line)["bytes_seen"] for line in (run / "metrics.jsonl").open()]
    (run / "step-000004.safetensors").unlink()
    resumed = arb_done("train", "--resume", str(run))
    assert (run / "step-000004.safetensors").read_bytes() == wanted
    assert [json.loads(line)["bytes_seen"] for line in (run / "metrics.jsonl").open()] == seen
    # eight windows of 54, each of a record
    assert float(re.findall("([0-9.]+) epochs", resumed.stderr)[-1]) == pytest.approx(8 / 54, 0.1)
    # four steps of two windows of 48 tokens, most of one byte, with padding between documents
    assert 4 * 2 * 24 < seen[-1] < 4 * 2 * 160
    plain = arb_done(*words, "--steps", "1", "--show-windows", "1")
    assert plain.stdout.startswith("window 1: ")
    assert "assistant\n[[fine" in plain.stdout
    ask = ["generate", "--checkpoint", str(run), "--chat", "--length", "5", "--device", "cpu"]
    report = arb_json(*ask, "--prompt", "you")
    assert report["prompt"] == "<|im_start|>user\nyou<|im_end|>\n<|im_start|>assistant\n"
    assert "contains the special token" in arb_error(*ask, "--prompt", "<|im_end|>")
    (tmp_path / "prompts").write_text('"you"\n"how"\n')
    batched = ["--prompts", str(tmp_path / "prompts"), "--temperature", "0"]
    texts = [json.loads(line)["text"] for line in arb_done(*ask, *batched).stdout.splitlines()]
    assert texts[1] == arb_json(*ask, "--prompt", "how", "--temperature", "0")["text"]
    trained = [json.loads(line)["val_loss"] for line in (run / "metrics.jsonl").open()]
    evaluated = arb_json("evaluate", str(run))
    assert evaluated["nats_per_byte"] == pytest.approx(trained[-1], rel=0.1)  # of drawn windows
    whole = arb_json("evaluate", str(run), "--data", str(data), "--field", "messages")
    assert whole["bytes"] == 60 * len(b"fine 0<|im_end|>\n")  # all answers, at any position
    assert whole["tokens"] == 60 * 6


@pytest.mark.parametrize("batch", [1, 3])
def test_loss_of_documents_is_the_mean_over_the_tokens_of_all_answers(tmp_path, tokenizer, batch):
    """Each document counts once, wherever it lies in its window."""
    records = [chat("how are you" * n, "fine" * (1 + n % 3)) for n in range(1, 9)]
    documents = chats(tmp_path, tokenizer, records, context=96)
    assert documents.pass_symbols == 96 * len(documents.bins) > 96 * 3  # padding included
    model = model_of(tokenizer.size, ctx=96)
    total = count = 0
    with torch.no_grad():
        for ids, targets in documents_of(documents):
            learnt = torch.tensor(targets) != NOT_LEARNT
            losses = model.position_losses(*(torch.tensor([part]) for part in (ids, targets)))[0]
            total, count = total + float(losses[learnt].double().sum()), count + int(learnt.sum())
    loss = document_loss(model, documents, batch=batch)
    assert loss == pytest.approx(total / count, rel=1e-5)
    assert count == documents.learnt_tokens
