"""Templates that mean harm: those that try to get out, and those that never end or fill the memory."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from localllm.chat import ChatTemplate
from localllm.chat import budget as budget_module
from localllm.errors import TemplateError

HELLO = [{"role": "user", "content": "hi"}]

# How much Python may hold at once for any of these.  Each would need far more, most of them gigabytes.
MOST_BYTES = 100 << 20


def doubling(step: str, start: str = "'a'", show: str = "{{ ns.s }}") -> str:
    """A template that applies ``step`` to its own result a hundred times."""
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range(100) %}}"
        f"{step if step.startswith('{%') else '{% set ns.s = ' + step + ' %}'}{{% endfor %}}{show}"
    )


ENDLESS = {
    "huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filter loops": "{% for i in range(999) %}{% for j in range(9999)|select %}{% endfor %}{% endfor %}",
    "filters in a loop": "{% for i in range(9999) %}{% set x = range(99999)|select|first %}{% endfor %}",
    "sorting by attribute": "{% for i in range(999) %}{% set x = range(99999)|groupby('real') %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling recursion": "{% macro f(n) %}{{ n and f(n-1) ~ f(n-1) }}{% endmacro %}{{ f(50) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "searching": "{% set x = 'a' * 4000000 %}{% for i in range(9999) %}{% set y = x.find('b') %}{% endfor %}",
    # sizes that are asked for
    "text times": "{{ 'a' * 10**10 }}",
    "list times": "{{ [1] * 10**10 }}",
    "times in a loop": "{% for i in range(99999) %}{% set x = ('ab' * 9999) * 100 %}{% endfor %}",
    "power": "{{ 2 ** 10000000 }}",
    "power of a power": "{{ (10 ** 1000) ** 1000 }}",
    "squares": doubling("ns.s * ns.s", "10"),
    "rounding": "{{ 5|round(-10**9) }}",
    "rounding up": "{{ 5|round(10**9, 'ceil') }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "percent filter": "{{ '%1000000000d'|format(1) }}",
    "many percents": "{{ ('%(a)s' * 5000) % {'a': 'a' * 100000} }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "many formats": "{{ ('{0}' * 5000).format('a' * 100000) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "center method": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "indent": "{{ 'a'|indent(10**10, true) }}",
    "indented lines": "{{ ('\n' * 999999)|indent(9999, blank=true) }}",
    "indent by text": "{{ ('a\n' * 99999)|indent('x' * 9999) }}",
    "replace": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "replace method": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "join": "{{ range(99999)|join('a' * 99999) }}",
    "join method": "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "JSON indent": "{{ ([[[[1]]]] * 9999)|tojson(indent=10**9) }}",
    "JSON separators": "{{ ([1] * 99999)|tojson(separators=(',' * 99999, ':')) }}",
    "date": "{{ strftime_now('%c' * 999999) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "adding lists": "{{ ([[1]] * 9999)|sum(start=[]) }}",
    "mapped width": "{{ range(99999)|map('string')|map('center', 9999)|join }}",
    "letters": "{{ ('ab' * 2000000)|list|length }}",
    "pieces": "{{ ('a,' * 2000000).split(',')|length }}",
    "words": "{{ ('a ' * 2000000).split()|length }}",
    "title": "{{ ('- ' * 2000000)|title|length }}",
    # growth by repetition
    "doubled text": doubling("ns.s ~ ns.s"),
    "added text": doubling("ns.s + ns.s"),
    "captured text": doubling("{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "filtered text": doubling("{% set x | upper %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "formatted text": doubling("'%s%s' % (ns.s, ns.s)"),
    "added lists": doubling("ns.s + ns.s", "[1]"),
    "lists in lists": doubling("[ns.s, ns.s]", "[1]"),
    "tuples in tuples": doubling("(ns.s, ns.s)", "(1,)"),
    "maps in maps": doubling("{'a': ns.s, 'b': ns.s}", "[1]", "{{ ns.s|tojson }}"),
    "dict calls": doubling("dict(a=ns.s, b=ns.s)", "[1]", "{{ ns.s|tojson }}"),
    "dict keys": doubling("dict.fromkeys([1, 2], ns.s)", "[1]"),
    "filled batches": doubling("[1]|batch(9, ns.s)|list", "[1]"),
    "printed again": "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "literal text": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "kept literal text": "{% for i in range(99999) %}{% set x %}" + "x" * 9999 + "{% endset %}{% endfor %}",
    "filter block": "{% for i in range(9999) %}{% filter center(9999) %}a{% endfilter %}{% endfor %}",
    "copies": "{% set x = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(99)),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "SECONDS", 0.3)
    template = ChatTemplate(ENDLESS[name])
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            template.render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_the_stop_works_in_any_thread() -> None:
    template = ChatTemplate(ENDLESS["nested loops"])
    caught: list[str] = []

    def work() -> None:
        try:
            template.render(HELLO)
        except TemplateError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == ["the chat template runs for more than 2 seconds, so it was stopped; give another one"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
        "{{ x" + ".a" * 6_000 + " }}",
        "{{ " + "not " * 6_000 + "1 }}",
        "{{ " + "1+" * 6_000 + "1 }}",
        "{{ x" + "|list" * 4_000 + " }}",
        "{% if 1 %}" * 2_000 + "{% endif %}" * 2_000,
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 10_000 + " }}",
        "x" * 10**7,
        "{{ a }}" * 10_000,
    ],
    ids=["parentheses", "attributes", "not", "sum", "filters", "if", "for", "digits", "characters", "tokens"],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="cannot be compiled"):
        ChatTemplate(source)


def test_nothing_runs_before_rendering() -> None:
    # The compiler would compute constants, and what autoescape is set to.
    for expression in ("'a' * 10**10", "'a'|center(10**10)", "2 ** 10000000", "'a' ~ 'b' * 10**10"):
        for source in ("{{ %s }}", "{%% set x = %s %%}", "{%% autoescape %s %%}{%% endautoescape %%}"):
            template = ChatTemplate(source % expression)
            with pytest.raises(TemplateError, match="stopped"):
                template.render(HELLO)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x.__name__ }}{% endfor %}",  # CVE-2024-34359
    "{{ ''|attr('format') }}",  # CVE-2025-27516
    "{{ '{0.__class__.__mro__}'.format('').upper().x.y }}",
    "{{ '{a.__class__}'.format_map({'a': ''}) }}",  # CVE-2016-10745, CVE-2019-10906
    "{% set f = '{0.__class__}'.format %}{{ f('').x.y }}",  # CVE-2024-56326
    "{{ ('{0.__class__}'|safe).format('').x.y }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ strftime_now.__code__.x }}",
    "{{ self._TemplateReference__context.x }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{{ namespace({'__init__': 1}) }}",
    "{{ (messages|map('string')).gi_frame.f_globals }}",
    "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}",
    "{% for a in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ messages|map(attribute='__class__')|first|attr('mro') }}",
    "{{ (messages|map(attribute='__class__')|first).mro() }}",
    "{{ dict.mro() }}",
    "{{ dict.__subclasses__() }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ (5).bit_length() }}",
    "{{ lipsum() }}",
    "{{ cycler(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ messages|#made }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_get_out(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(messages)
    assert messages == HELLO


def test_private_attributes_show_nothing() -> None:
    shown = "{{ ''['__class__'] }}{{ '{0.__class__}'.format(1) }}{{ messages|map(attribute='__class__')|first }}"
    assert ChatTemplate(shown).render(HELLO) == ""


class Secret(str):
    """A string with a method that must not be called."""

    def upper(self) -> str:
        raise AssertionError("a template called a method of the caller's object")


def test_a_template_meets_plain_data_only() -> None:
    assert ChatTemplate("{{ x.upper() }}").render([], x=Secret("a")) == "A"
    with pytest.raises(TemplateError, match="x holds a function"):
        ChatTemplate("{{ x() }}").render([], x=lambda: 1)


def test_what_templates_do_works() -> None:
    """The filters, methods and statements of public templates, each with its result in plain jinja2."""
    source = (
        "{%- set ns = namespace(n=0, found=false) -%}"
        "{%- macro show(x, sep=', ') -%}<{{ x|join(sep) }}>{%- endmacro -%}"
        "{%- for m in messages if m.role != 'x' -%}{%- set ns.n = ns.n + loop.index -%}"
        "{{ loop.first }}{{ loop.last }}{{ loop.length }}{%- endfor -%}"
        "|{{ ns.n }}|{{ show(['a', 'b']) }}|{{ 'a-b-c'.split('-')[-1] }}|{{ ' x '|trim }}|{{ ' x '.strip() }}"
        "|{{ messages[::-1][0].content }}|{{ messages|length }}"
        "|{{ {'a': 1}|tojson }}|{{ {'a': [1]}|tojson(indent=2) }}"
        "|{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "|{{ messages|map(attribute='role')|join }}"
        "|{{ 'A' if 'b' in 'abc' else 'B' }}|{{ 'abc'.replace('b', 'x') }}|{{ 'abc'|replace('b', 'y') }}"
        "|{{ 'x'.startswith('x') }}|{{ nothing is defined }}|{{ nothing|default('d') }}|{{ 3 is odd }}"
        "|{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}"
        "|{% for k, v in {'b': 1}.items() %}{{ k }}={{ v }}{% endfor %}"
        "|{{ 'a\nb'|indent(2) }}|{{ [3, 1]|sort|first }}"
        "|{{ '%s-%02d' % ('a', 5) }}|{{ '{}-{:>3}'.format('a', 5) }}"
        "|{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 'ab' * 2 }}"
        "|{{ [1, 2]|sum }}|{{ 2.567|round(1) }}|{{ 'a,b'|upper }}"
        "|{{ ['a']|string }}|{{ '<'|e }}|{{ 'a' ~ 1 ~ none }}"
        "|{% generation %}g{% endgeneration %}|{% filter upper %}f{% endfilter %}"
        "|{% set x %}c{% endset %}{{ x }}"
        "|{% call(y) show2() %}{{ y }}{% endcall %}"
    )
    source = "{%- macro show2() -%}{{ caller('called') }}{%- endmacro -%}" + source
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert ChatTemplate(source).render(messages) == (
        'TrueFalse2FalseTrue2|3|<a, b>|c|x|x|two|2|{"a": 1}|{\n  "a": [\n    1\n  ]\n}'
        "|1|userassistant|A|axc|ayc"
        "|True|False|d|True|a2b1|b=1|a\n  b|1|a-05|a-  5|3332abab|3|2.6|A,B|['a']|&lt;|a1None|g|F|c|called"
    )


def test_long_chats_fit_the_budget() -> None:
    """A megabyte of messages through what templates do to each of them."""
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
        "{% set text = m.content|trim %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{% set ns.seen = ns.seen + [m] %}{{ '<|' ~ m.role ~ '|>' + text.strip() + '\n' }}{% endfor %}"
    )
    words = "word " * 200
    messages = [{"role": "user", "content": words} for _ in range(1000)]
    assert ChatTemplate(source).render(messages) == f"<|user|>{words.strip()}\n" * 1000


def test_the_budget_counts_what_is_shared_as_often_as_it_shows() -> None:
    budget = budget_module.Budget(0)
    shared = ["x" * 1000]
    assert budget.weight([shared, shared]) >= 2 * budget.weight(shared)
    assert budget.weight({"a": shared}) > budget.weight(shared) > 1000
