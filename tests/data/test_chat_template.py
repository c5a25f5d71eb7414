"""Chat templates write messages, and do nothing else whatever they try."""

import json

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
HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('touch HERE').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "function": "{{ raise_exception.__globals__['__builtins__']['open']('HERE', 'w') }}",
    "type": "{{ namespace.__init__.__globals__ }}", "file": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}", "change": "{{ messages.append(1) }}",
    "long string": "{{ 'a' * 1000000000 }}", "long list": "{{ [messages] * 1000000000 }}",
    "power": "{{ 7 ** 99999999 }}", "wide": "{{ '%9999999999d' % 3 }}",
    "wide format": "{{ '{:9999999999}'.format(3) }}", "padded": "{{ 'a'.ljust(9999999999) }}",
    "centred": "{{ 'a' | center(9999999999) }}",
    "loop": "{% for i in range(10000000) %}{% endfor %}",
    "loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "lists": "{% set l = 'abcdefghij' | list %}" + "{% for i in l %}" * 9 + "{% endfor %}" * 9,
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    **{
        value: "{% set n = namespace(x='a', y=[1], z=9) %}{% for i in range(99) %}{% set n."
        + f"{value} %}}{{% endfor %}}"
        for value in (
            "x = n.x ~ n.x", "x = n.x.replace('a', 'aa')", "y = n.y + n.y", "z = n.z * n.z",
        )
    },
    "block": "{% set x %}a{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 99,
    "with": "{% set x = 'a' %}" + "{% with x = x + x %}" * 99 + "{% endwith %}" * 99,
    "slices": "{{ [1] | slice(10000000000) | list }}",
    "digits": "{{ 1 | round(10000000000, 'ceil') }}",
    "width": "{{ '{:1000000}'.format(1) }}", "attribute": "{{ '{0.__class__}'.format(1) }}",
    "width of an argument": "{{ '{:{}}'.format(1, 1000000) }}",
    "refusal": "{{ raise_exception('no system message') }}", "syntax": "{% if %}",
    **{
        value: "{% set x = ('a',) %}" + "{% set x = (x, x) %}" * 20 + f"{{{{ {value} }}}}"
        for value in (
            "x", "x | tojson", "x ~ ''", "x == (x, 1)", "x is eq (x, 1)", "(x, 1).index(x)",
            "{x: 1} | length", "{}[x]", "{}.get(x)", "'{}'.format(x)", "[x] | map('string') | list",
            "[x] | select('eq', (x, 1)) | list", "namespace(x=x)", "raise_exception(x)",
        )
    },
    **{
        value: "{% set x = 'abcdefgh' %}" + "{% set x = x ~ x %}" * 11 + value
        for value in (
            "{{ (x" + " ~ x" * 400 + ") | length }}", "{{ [" + "x[1:], " * 400 + "] | length }}",
            "{% set x %}" + "{{ x }}" * 400 + "{% endset %}", "{{ x.join(x | list) | length }}",
            "{{ x | list | join(x) | length }}", "{{ x.replace('a', x) | length }}",
            "{{ x | replace('a', x) | length }}", "{{ x.translate({97: x}) | length }}",
            "{{ x | replace(new=x, old='a') | length }}", "{{ ('{0}' ~ x)['format'](1) }}",
            "{{ x.rfind('z' ~ x[:8000]) }}", "{{ x.strip(x ~ 'z') }}",
            "{{ x | tojson(separators=(x, x)) }}", "{{ (x.split('a') | list, x, 1)[2] }}" * 99,
            "{{ ('" + "{0}" * 400 + "').format(x) | length }}",
            "{% for i in range(9) recursive %}{% if not loop.depth0 %}{{ loop(x) }}{% endif %}"
            "{% endfor %}" * 9,
            "{% for i in range(999) %}{% if 'z' in x %}{% endif %}{% endfor %}",
            "{% macro f(a=x ~ 'b') %}{% endmacro %}{% for i in range(999) %}{{ f() }}{% endfor %}",
        )
    },
    "body": "{% for i in range(9999) %}" + "{{ '' }}" * 99 + "{% endfor %}",
    "varargs": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}"
    "{% endif %}{% endmacro %}{{ f(20, 1) }}",
    "views": "{% set x = {} %}" + "{% set x = {1: x.items(), 2: x.items()} %}" * 20 + "{{ x }}",
    "indent": "{% set x = range(999) | list %}" + "{% set x = [x] %}" * 300
    + "{{ x | tojson(indent=8) | length }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}", "remainder": "{{ '%9999999999d' is odd }}",
    "no tag": "{% exec 'ls' %}", "nothing": "{{ nothing.there }}",
}  # fmt: skip


def test_template_writes_messages_as_transformers_does():
    template = ChatTemplate(CHATML, "it", {"bos_token": "<s>"})
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}]
    wanted = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages[:1], asks=True) == wanted
    assert template.render(messages) == f"{wanted}ho<|im_end|>\n"


@pytest.mark.parametrize("source", HOSTILE.values(), ids=[name[:40] for name in HOSTILE])
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
