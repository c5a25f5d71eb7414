"""Chat templates write messages, and do nothing else whatever they try."""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from apparatus.forking import run_forked

from arbcli.base.errors import ArbError
from arbcli.data import template_sandbox
from arbcli.data.chat_template import ChatTemplate, find_template
from arbcli.data.special_tokens import special_tokens

pytest.importorskip("jinja2", reason="needs the package jinja2")

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECORDED = Path(__file__).with_name("hostile_templates.txt").read_text(encoding="utf-8")


def hostile() -> Iterator[tuple[str, str]]:
    """Yield the lines of `hostile_templates.txt`, each with a part of its refusal, the last `==`.

    A part that is repeated so many times is `«so many|part»` there.
    """
    for section in RECORDED.split("== ")[1:]:
        said, *lines = section.splitlines()
        for line in lines:
            yield re.sub("«([0-9]+)[|](.*?)»", lambda part: int(part[1]) * part[2], line), said


def test_template_writes_messages_as_transformers_does():
    template = ChatTemplate(CHATML, "it", {"bos_token": "<s>"})
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}]
    wanted = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages[:1], add_generation_prompt=True) == wanted
    assert template.render(messages) == f"{wanted}ho<|im_end|>\n"
    assert template.render(messages * 9999) == "<s>" + 9999 * f"{wanted[3:]}ho<|im_end|>\n"


@pytest.mark.parametrize(("source", "said"), [*hostile()], ids=lambda text: text[-40:])
def test_hostile_template_is_refused_in_one_line(source, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.05 if "takes" in said else 60)
    monkeypatch.setattr(template_sandbox, "MAX_BYTES", 2**29)
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 9999)
    with pytest.raises(ArbError, match=re.escape(said)) as caught:
        ChatTemplate(source, "it", {}).render([{"role": "user", "content": "hi"}])
    assert re.fullmatch("`it` .*", str(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_filters_and_methods_open_no_file():
    """Jinja and Python import some modules late: in the sandbox they are there from the start."""
    from jinja2.filters import FILTERS

    calls = [f"| {name}" for name in FILTERS] + [f".{name}" for name in dir(str) if name[0] != "_"]
    refusals = []
    for call in [call + arguments for call in calls for arguments in ("()", "(1)", "('utf-8')")]:
        try:
            ChatTemplate("{{ 'a\\nb'" + call + " }}", "it", {}).render([])
        except ArbError as error:
            refusals.append(str(error))
    assert "open files" not in "\n".join(refusals)


def test_sandbox_serves_threads_and_forks_and_outlives_interruptions(monkeypatch, tmp_path):
    loops = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"
    template, endless = (ChatTemplate(s, "it", {}) for s in ("{{ messages[0].content }}", loops))

    def write(number: int) -> None:
        assert template.render([{"content": str(number)}]) == str(number)

    with ThreadPoolExecutor(4) as threads:
        writing = threads.map(write, range(400))
        assert run_forked(lambda: [write(number) for number in range(99)], tmp_path / "log") == 0
        assert list(writing) == [None] * 400
    monkeypatch.setattr(template_sandbox, "SECONDS", 9999)
    for name, value, error in (("PATIENCE", 0, ArbError), ("select", None, AttributeError)):
        with monkeypatch.context() as patch:
            patch.setattr(template_sandbox, name, value)
            with pytest.raises(error):
                endless.render([])
        write(2)
    monkeypatch.setattr(sys, "executable", "missing")
    with pytest.raises(ArbError, match="cannot start `missing`"):
        template_sandbox._Sandbox().answer("", None)


def test_template_is_found_wherever_transformers_writes_it(tmp_path):
    file = tmp_path / "tokenizer.json"
    assert find_template(file) is None
    settings = tmp_path / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    settings.write_text(json.dumps({"chat_template": several, "eos_token": {"content": "</s>"}}))
    template = find_template(file)
    assert (template.source, template.tokens["eos_token"]) == ("a", "</s>")
    (tmp_path / "chat_template.jinja").write_text("c")
    assert find_template(file).source == "c"
    (tmp_path / "hugging_face").mkdir()
    (tmp_path / "hugging_face" / "chat_template.json").write_text('{"chat_template": "d"}')
    assert find_template(file).source == "d"


def test_variables_filters_and_marks_are_those_of_transformers():
    pytest.importorskip("transformers", reason="needs the package transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% if tools is not none %}"
        "{{ tools | tojson(indent=2, separators=(', ', ':'), sort_keys=true) }}{% endif %}"
        "{% if documents is none %}PLAIN {% endif %}"
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{{ sep_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '{:>3}|{}'.format(loop.index, m.role) }}{{ mask_token }}"
        "{{ dict(a=1) | tojson(ensure_ascii=true) }}{% endfor %}"
    )
    tokens = {"sep_token": "<sep>", "mask_token": "<m>"}
    messages = [
        {"role": role, "content": f"{role} \u00fc"}
        for role in ("user", "assistant")
        for _ in range(2)
    ]
    template = ChatTemplate(source, "it", tokens)
    assert template.variables >= {"tools", "documents"}
    for tools in (None, [{"name": "b", "a": [1, 2]}]):
        wanted, marks = render_jinja_template(
            [messages], tools=tools, documents=None, chat_template=source,
            return_assistant_tokens_mask=True, **tokens,
        )  # fmt: skip
        assert template.render_marked(messages, tools=tools) == (wanted[0], marks[0])
        assert len(marks[0]) == 2


def test_special_tokens_are_read_as_transformers_reads_them(tmp_path):
    """The map of older versions counts unless the settings have the tokens of newer ones."""
    settings, older = tmp_path / "tokenizer_config.json", tmp_path / "special_tokens_map.json"
    settings.write_text(json.dumps({"eos_token": "<a>", "sep_token": {"content": "<s>"}}))
    older.write_text(json.dumps({"eos_token": "<b>", "cls_token": "<c>", "bos_token": None}))
    wanted = {"eos_token": "<b>", "sep_token": "<s>", "cls_token": "<c>"}
    assert special_tokens(tmp_path) == wanted
    settings.write_text(json.dumps({"eos_token": "<a>", "added_tokens_decoder": {}}))
    assert special_tokens(tmp_path) == {"eos_token": "<a>"}
    settings.write_text(json.dumps({"extra_special_tokens": {"image_token": "<i>"}}))
    assert special_tokens(tmp_path)["image_token"] == "<i>"
