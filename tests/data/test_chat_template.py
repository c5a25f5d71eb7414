"""Chat templates write messages, and do nothing else whatever they try."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def hostile() -> Iterator[str]:
    """Yield the lines of `hostile_templates.txt`, each after the end of the last `##`.

    A part that is repeated so many times is `«so many|part»` there.
    """
    beginning = ""
    for line in RECORDED.splitlines():
        if line.startswith("##"):
            beginning = line[3:]
        else:
            line = beginning + line
            yield re.sub("«([0-9]+)[|](.*?)»", lambda part: int(part[1]) * part[2], line)


def test_template_writes_messages_as_transformers_does():
    template = ChatTemplate(CHATML, "it", {"bos_token": "<s>"})
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}]
    wanted = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages[:1], asks=True) == wanted
    assert template.render(messages) == f"{wanted}ho<|im_end|>\n"


@pytest.mark.parametrize("source", hostile(), ids=lambda source: source[-40:])
def test_hostile_template_is_refused_in_one_line(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(template_sandbox, "MOST_UNITS", 2**20)
    monkeypatch.setattr(template_sandbox, "LONGEST_VALUE", 2**19)
    with pytest.raises(ArbError) as caught:
        ChatTemplate(source, "it", {}).render([{"role": "user", "content": "hi"}])
    assert str(caught.value).startswith("`it` ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [("{{ a" + "<a" * 9999 + " }}", "more code than"), ("a" * (2**18 + 1), "262,144 characters")],
    ids=["code", "text"],
)
def test_template_that_would_take_long_to_compile_is_refused(source, problem, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ArbError, match=f"is not a chat template: it has .*{problem}"):
        find_template(tmp_path / "tokenizer.json")


def test_long_chat_has_the_budget_that_it_needs():
    messages = [{"role": "user", "content": "hi" * 99}] * 9999
    text = ChatTemplate(CHATML, "it", {"bos_token": ""}).render(messages)
    assert len(text) == 9999 * len("<|im_start|>user\n<|im_end|>\n" + "hi" * 99)


def test_namespace_is_written_without_its_values():
    assert ChatTemplate("{{ namespace(x=messages) }}", "it", {}).render([]) == "<Namespace>"


def test_nothing_makes_a_long_text_of_a_short_one_and_a_number():
    """Whatever filters the installed Jinja has, and whatever methods strings have."""
    filters = ChatTemplate("", "it", {})._template.environment.filters
    calls = [f"'a\\nb' | {name}" for name in filters]
    calls += [f"'a\\nb'.{name}" for name in dir(str) if name[0] != "_"]
    assert len(calls) > 80
    for call in calls:
        try:
            text = ChatTemplate("{{ " + call + "(1000000) }}", "it", {}).render([])
        except ArbError:
            continue
        assert len(text) < 1000, call


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
