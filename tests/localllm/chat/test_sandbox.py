"""Malicious templates end with a result or a typed error, and all features that templates need still work."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from localllm.chat import ChatTemplate, sandbox
from localllm.errors import TemplateError
from tests.helpers.data import ROOT
from tests.localllm.chat.hostile_templates import ALONE, ESCAPES, operations

HELLO = [{"role": "user", "content": "hi"}]


def test_hostile_templates_end_typed() -> None:
    """Render in a separate process, which they might crash, with a small budget, because it counts the work."""
    command = [sys.executable, "-m", "tests.localllm.chat.hostile_templates", str(sandbox.BUDGET // 100), "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1].split()[0]) > 250


def test_lazy_filters_do_not_nest() -> None:
    rendered: list[str] = []
    thread = threading.Thread(target=lambda: rendered.append(ChatTemplate(ALONE["issue 1"]).render(HELLO)))
    thread.start()
    thread.join()
    assert rendered == ["1"]


@pytest.mark.parametrize("name", ["issue 2", "loops in loops", "two macros", "kept literal"])
def test_work_without_end_is_stopped(name: str) -> None:
    with pytest.raises(TemplateError, match=r"was stopped: it .*; give another template"):
        ChatTemplate(ALONE[name]).render(HELLO)


@pytest.mark.parametrize(
    "name", ["parentheses", "attributes", "plus", "if", "for", "long number", "characters", "tokens"]
)
def test_a_template_that_cannot_be_compiled_is_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="cannot be compiled"):
        ChatTemplate(ALONE[name])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% include 'x' %}", "'include' is not allowed"),
        ("{% autoescape 2 ** 10000000 %}{% endautoescape %}", "'autoescape' is not allowed"),
        ("{% for x in [1] recursive %}{% endfor %}", "'recursive loop' is not allowed"),
        ("{{ dict(**x) }}", r"'\*\*' is not allowed"),
        ("{{ 1 < 2 < 3 }}", "chains of comparisons are not allowed"),
        ("{{ x|groupby('a') }}", "No filter named 'groupby'"),
        ("{{ x is filter }}", "No test named 'filter'"),
        ("{{ ['a']|map('center')|list }}", "No filter named 'center'"),
        ("{{ 'a'.zfill(9) }}", "calls 'zfill', which is not allowed"),
        ("{{ '%s' % 1 }}", "uses '%' on text or lists"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{{ range }}", "'function' is not data"),
        ("{{ {(1, 2): 3} }}", "'tuple' cannot be a key"),
    ],
)
def test_what_is_refused_is_named(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source).render(HELLO)


def test_nothing_runs_before_rendering() -> None:
    for expression in ("'a' * 10**10", "'a'|indent(10**10, true)", "2 ** 10000000", "'a' ~ 'b' * 10**10"):
        for source in ("{{ %s }}", "{%% set x = %s %%}"):  # the compiler would evaluate constants
            template = ChatTemplate(source % expression)
            with pytest.raises(TemplateError, match="stopped"):
                template.render(HELLO)


@pytest.mark.parametrize("expression", operations(ESCAPES))
def test_a_template_cannot_get_out(expression: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError):
        ChatTemplate("{{ " + expression + " }}").render(messages)
    assert messages == HELLO


def test_private_attributes_show_nothing() -> None:
    shown = "{{ ''['__class__'] }}{{ messages|map(attribute='__class__')|first }}{{ namespace()._Namespace__attrs }}"
    assert ChatTemplate(shown + "{% set n = namespace() %}{% set n._x = 1 %}{{ n._x }}").render(HELLO) == ""


class Secret(str):
    """A string with a method that must not be called."""

    def upper(self) -> str:
        raise AssertionError("a template called a method of the caller's object")


def test_a_template_meets_plain_data_only() -> None:
    assert ChatTemplate("{{ x.upper() }}").render([], x=Secret("a")) == "A"
    with pytest.raises(TemplateError, match="x holds a function"):
        ChatTemplate("{{ x() }}").render([], x=lambda: 1)


def test_what_a_template_says_is_cut_to_one_short_line() -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate("{{ raise_exception('a\x1b[31m\n' * 9999) }}").render(HELLO)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_long_chats_fit_the_budget() -> None:
    """A megabyte of messages, and a thousand turns with tools, with the operations of templates on each message."""
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
        "{% set text = m.content|trim %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{% set ns.seen = ns.seen + [m] %}{{ '<|' ~ m.role ~ '|>' + text.strip() + '\n' }}{% endfor %}"
    )
    words = "word " * 200
    messages = [{"role": "user", "content": words} for _ in range(1000)]
    assert ChatTemplate(source).render(messages) == f"<|user|>{words.strip()}\n" * 1000
    source = (  # gpt-oss looks ahead from each tool call, Gemma 4 back from each message
        "{% for m in messages %}{% set ns = namespace(found=false) %}{% for later in messages[loop.index:] %}"
        "{% if later.role == 'assistant' and 'tool_calls' not in later %}{% set ns.found = true %}{% endif %}"
        "{% endfor %}{{ ns.found }}{% endfor %}"
    )
    assert ChatTemplate(source).render(messages[:600]) == "False" * 600
