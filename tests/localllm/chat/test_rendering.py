"""Templates render as in Hugging Face transformers: real templates, and every language feature separately."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest
import tokenizers

from localllm.chat import ChatTemplate
from localllm.errors import TemplateError
from tests.helpers.data import shared_data
from tests.localllm.chat.hostile_templates import operations

Messages = list[dict[str, Any]]

TEMPLATES = [
    "HuggingFaceTB-SmolLM3-3B",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
]

CALL = {
    "type": "function",
    "id": "abc123def",
    "function": {"name": "weather", "arguments": {"city": "Ås", "n": [1, 2.5]}},
}
CHATS: dict[str, Messages] = {
    "short": [{"role": "user", "content": "Hi there"}],
    "long": [
        {"role": "system", "content": "Be <b>brief</b>."},
        {"role": "user", "content": 'Say "hé" & \n漢 🙂'},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhé!"},
        {"role": "user", "content": "  thanks  "},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "abc123def", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Good."},
    ],
    "reasoning": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm <b>", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "abc123def", "content": "sunny"},
        {"role": "tool", "name": "weather", "tool_call_id": "abc123def", "content": "warm"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "So", "thinking": "So"},
        {"role": "user", "content": "And 漢?"},
    ],
    "out of turn": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says "how it is"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "the <city>"}},
                "required": ["city"],
            },
            "return": {"type": "string"},
        },
    }
]


@functools.cache
def reference(source: str) -> jinja2.Template:
    """Compile the template as transformers does (utils/chat_template_utils.py), in plain jinja2."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

        def _keep(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: form
    return environment.from_string(source)


@pytest.fixture
def fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now() -> Clock:
            return Clock()

        def strftime(self, form: str) -> str:
            return form

    monkeypatch.setattr("localllm.chat.sandbox.datetime", Clock)


#: Templates of llama.cpp's source, if LLAMA_CPP is its folder, except two: jinja2 rejects one, and writes &#34;
#: instead of quotation marks in the other.
ALL = [
    path
    for path in sorted(Path(os.environ.get("LLAMA_CPP", "/nowhere"), "models", "templates").glob("*.jinja"))
    if path.stem not in ("llama-cpp-deepseek-r1", "meetkai-functionary-medium-v3.1")
]


@pytest.mark.usefixtures("fixed_date")
@pytest.mark.parametrize("name", [*TEMPLATES, *ALL], ids=lambda name: getattr(name, "stem", name))
def test_real_templates_render_as_with_hugging_face(name: str | Path) -> None:
    path = name if isinstance(name, Path) else shared_data(f"templates/{name}.jinja")
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    rendered = 0
    for messages, tools, prompt, thinking in itertools.product(
        CHATS.values(), (None, TOOLS), (True, False), (True, False)
    ):
        options = {"tools": tools, "add_generation_prompt": prompt}
        options |= {"enable_thinking": thinking, "thinking": thinking}
        expected, refusal = reference_rendering(source, {"messages": messages, **options})
        if refusal:  # roles must alternate, or system messages are rejected: their text then moves to another message
            with contextlib.suppress(TemplateError):
                text = template.render(messages, **options)
                assert all(str(message["content"] or "").strip() in text for message in messages), refusal
        elif loses_calls(messages, expected):
            assert '{"name": "weather", "arguments": {"city": "Ås"' in template.render(messages, **options)
        else:
            assert template.render(messages, **options) == expected
            rendered += 1
    assert rendered >= 8 or isinstance(name, Path)


def loses_calls(messages: Messages, text: str) -> bool:
    """Return whether a template omits tool calls, which then become text."""
    return any("tool_calls" in message for message in messages) and "Ås" not in text and "u00c5s" not in text


def with_thinking(messages: Messages) -> Messages:
    """Return messages as transformers prepares them: templates find the reasoning under a second name."""
    return [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]


def reference_rendering(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    """Return the text and "", or "" and the error message."""
    variables |= {"messages": with_thinking(variables["messages"])}
    try:
        return reference(source).render(variables, bos_token="<s>", eos_token="</s>"), ""
    except (jinja2.TemplateError, TypeError) as error:
        return "", " ".join(str(error).split())


@pytest.mark.usefixtures("fixed_date")
def test_templates_render_as_with_transformers() -> None:
    """`reference_rendering` imitates transformers; this test compares it with transformers, if installed."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'reference'")
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, "x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="<s>", eos_token="</s>")
    real = [path.read_text(encoding="utf-8") for path in sorted(shared_data("templates").glob("*.jinja"))]
    compared = 0
    for source, messages in itertools.product([*real, *FEATURES.values()], CHATS.values()):
        if "strftime_now" in source:
            continue
        options = {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": True, "thinking": True}
        try:
            expected = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        except (jinja2.TemplateError, TypeError):
            continue
        text = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)
        assert text == expected or loses_calls(messages, expected)
        compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("switch", "given", "thinks"),
    [
        ("enable_thinking", {}, True),
        ("enable_thinking", {"enable_thinking": False}, False),
        ("thinking", {}, True),
        ("thinking", {"enable_thinking": False}, False),
        ("thinking", {"thinking": False}, False),
        ("enable_thinking", {"thinking": False}, False),
    ],
)
def test_a_model_thinks_unless_that_is_switched_off(switch: str, given: dict[str, bool], thinks: bool) -> None:
    source = "{% if not SWITCH is defined %}{% set SWITCH = false %}{% endif %}{{ messages[0].content }}"
    source += "{{ '<think>' if SWITCH else '<think></think>' }}"
    text = ChatTemplate(source.replace("SWITCH", switch)).render([{"role": "user", "content": "Hello"}], **given)
    assert text == "Hello<think>" + ("" if thinks else "</think>")


@pytest.mark.parametrize(("given", "mode"), [({}, "enabled"), ({"enable_thinking": False}, "disabled")])
def test_a_switch_for_thinking_may_have_words(given: dict[str, bool], mode: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ thinking_mode }}")
    assert template.render([{"role": "user", "content": "Hello"}], **given) == f"Hello{mode}"


def test_a_template_without_a_switch_for_thinking(recwarn: pytest.WarningsRecorder) -> None:
    source = "{% for m in messages %}{% set thinking = m.thinking %}{{ thinking }}{{ m.content }}{% endfor %}<think>"
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": "Hello"}]) == "Hello<think>"
    assert not recwarn
    assert template.render([{"role": "user", "content": "Hello"}], enable_thinking=False) == "Hello<think>"
    assert "no switch for thinking" in str(recwarn.pop().message)


# Each is applied to all `VALUES` as x.
EXPRESSIONS = """
    x|abs; x|capitalize; x|count; x|dictsort; x|dictsort(reverse=true); x|dictsort(by='value'); x|first; x|float
    x|float(1.5); x|int; x|int(7); x|int(default=1, base=16); x|items|list; x|join('-'); x|join(', ')|upper; x|last
    x|length > 1; x|list; x|lower; x|max; x|min; x|reverse|list; x|round; x|round(1, 'floor'); x|safe; x|sort
    x|sort(reverse=true); x|sort(case_sensitive=true); x|string; x|sum; x|title; x|trim; x|trim('a '); x|upper
    x|unique|list; x|tojson; x|tojson(indent=2); x|tojson(ensure_ascii=true); x|tojson(separators=(',', ':'))
    x|tojson(sort_keys=true, indent=4); x|default('x', true); x|default([])|length; x|d(5); x|map('upper')|list
    x|map(attribute='role')|list; x|map(attribute='k.v', default=9)|list; x|select|list; x|reject('none')|list
    x|selectattr('role', 'equalto', 'user')|list; x|rejectattr('content')|map(attribute='role')|list
    x|select('odd')|list; x|selectattr('k', 'defined')|map(attribute='k')|list; x|select('in', [1, 'a'])|list
    x|map('string')|join(','); x|replace('a', 'b'); x|replace('l', 'LL', 1); (x ~ '')|indent
    (x ~ '')|indent(2, true); (x ~ '')|indent(3, blank=true); (x ~ '')|indent('> ')
    x|sort(attribute='role')|map(attribute='role')|list; x|min(attribute='role'); x|first|upper; x is boolean
    x is callable; x is defined; x is even; x is false; x is float; x is integer; x is iterable; x is mapping
    x is none; x is number; x is odd; x is sequence; x is string; x is true; x is undefined; x is not none
    x is in [1, 'a']; x is divisibleby 3; x is eq 3; x is sameas none; x is gt 1; x is ne ''; not x; -x; +x; x[0]
    x[-1]; x['role']; x.role; x.a.b; x['items'] is defined; x.items is defined; x[1:]; x[::-1]; x[:-1]; x[0:2][::-1]
    x.upper(); x.strip(); x.strip('< '); x.lstrip('H'); x.rstrip(); x.split(); x.split('-'); x.split(' ', 1)
    x.split('l')[-1]; x.rsplit('l', 1); x.replace('l', ''); x.replace('', '.'); x.startswith('H')
    x.endswith(('x', ' ')); x.find('l'); x.rfind('l'); (x ~ '').count('l'); x.title(); x.capitalize(); x.lower()
    x.isdigit(); x.isalpha(); x.removeprefix('He'); x.removesuffix(' '); ', '.join(x); x.items()|list; x.keys()|list
    x.keys(); x.values()|list; x.get('b'); x.get('zz', 5); x.get('k', {}).v; 'a' in x; 1 in x; 'role' in x
    none in x; 'Hello' not in x; x in ['a', 'b', 3]; x == 3; x != ''; x == x; x == []; 'x' ~ x ~ 1; x if x else 'no'
    x and 1; x or 'or'; [x, 1]; (x, 2); {'k': x}; {x: 1}; dict(k=x); dict(x); namespace(k=x).k; x|tojson|safe
    (x|string) + '!'; range(x)|list; x // 2; x % 4; x ** 2; x * 2; 2 * x; x + 1; x + 'x'; x + [1]
    '<{}> {}'.format(x, 1); '{a_b}{0}{0}{{}}'.format(x, a_b=x)
    x - 1; x / 2; x < 3; x >= 3; x > 'a'; x <= [5]; (x|map('string')|list) + ['q']
    'yes' if x|list|selectattr('nope') else 'no'
"""
VALUES: list[Any] = [
    *(
        "Hello <b>wörld</b>, it's\n a Day ",
        "",
        "a-b c",
        "12",
        3,
        2.5,
        0,
        -7,
        True,
        None,
        [],
        {},
        [3, 1, 2],
        jinja2.Undefined(),
    ),
    *(["b", "A", "c", "a"], {"b": 1, "A": [1, 2], "items": "x"}, {"role": "user", "k": {"v": 1}}),
    [{"role": "user", "content": "x", "k": {"v": 1}}, {"role": "assistant", "content": None}],
]


def test_expressions_give_what_they_give_in_plain_jinja() -> None:
    compared = 0
    for expression in operations(EXPRESSIONS):
        source = "{{ " + expression + " }}"
        template, plain = ChatTemplate(source), reference(source)
        for value in VALUES:
            values = {} if isinstance(value, jinja2.Undefined) else {"x": value}
            try:
                expected = plain.render(values)
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
                with pytest.raises(TemplateError):
                    template.render([], **values)
                continue
            assert template.render([], **values) == expected, (expression, value)
            compared += 1
    assert compared > 1500


# Template features other than expressions.
FEATURES = {
    "namespaces and loop controls": """
{%- set ns = namespace(n=0, seen=[], last='') -%}
{%- for m in messages if m.role != 'x' -%}
    {%- if loop.index0 == 3 %}{% break %}{% endif -%}
    {%- set ns.n = ns.n + loop.index -%}
    {%- set ns.seen = ns.seen + [m.role] -%}
    {{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}
    {%- if loop.previtem and loop.previtem.role != m.role %}<{% endif %}
    {%- if not loop.last %}{{ loop.nextitem.role }}{% endif %}
    {%- if m.role in ns.seen[:-1] %}{% continue %}{% endif %}!
{%- else %}none{% endfor %}
{{ ns.n }}{{ ns.seen }}{{ ns.other is defined }}{% for m in [] %}x{% else %}none{% endfor %}
""",
    "macros": """
{%- macro show(value, depth=0, sep=', ') %}
    {%- if value is mapping %}<
        {%- for key, item in value|items %}{{ key }}:{{ show(item, depth + 1, sep=sep) }}{{ sep if not loop.last }}
        {%- endfor %}>
    {%- elif value is iterable and value is not string %}[
        {%- for item in value %}{{ show(item, depth=depth + 1) }};{% endfor %}]
    {%- else %}{{ value }}@{{ depth }}{% endif %}
{%- endmacro %}
{{- show(tools) }}{{ show(messages, sep='/')|trim|length }}
{%- macro rest() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ rest(1, *[2, 3], a=4) }}
{%- set todo = [show, rest] %}{% set given = [[1], ['x', 2]] %}
{%- for i in range(todo|length) %}{{ todo[i](*given[i]) }}{% endfor %}
""",
    "call blocks": """
{%- macro fields(spec, pad) %}
    {%- set ns = namespace(f=caller()) %}
    {%- for name, field in spec.properties|items %}
        {%- if field.properties %}{% call fields(field, '  ') %}class {{ name|title }}:{% endcall %}{% endif %}
        {%- set ns.f = ns.f + pad + name + ': ' + field.type %}
    {%- endfor %}{{ ns.f }}
{%- endmacro %}
{%- for tool in tools or [] %}
    {%- call fields(tool.function.parameters, '    ') %}def {{ tool.function.name }}:{% endcall %}
{%- endfor %}
{%- macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}
{%- call(n) twice() %}{{ n }}{{ messages[0].role }}{% endcall %}
""",
    "blocks that are kept": """
{%- set text -%} {% for m in messages %}{{ m.role }} {% endfor %} {%- endset %}[{{ text|upper }}]{{ text is string }}
{%- set low | lower %}ABC{% endset %}{{ low }}{% filter upper|replace('A', 'B') %}aßc{% endfilter %}
{%- with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}
{%- generation %}{% set inner = 1 %}g{{ inner }}{% endgeneration %}{{ inner is defined }}
{%- raw %}{{ x }}{% endraw %}{# {{ y }} #}
""",
    "scopes": """
{%- set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
{%- if true %}{% set x = 9 %}{% endif %}{{ x }}
{%- macro f() %}{{ x }}{% set x = 5 %}{{ x }}{% endmacro %}{{ f() }}{% set x = 7 %}{{ f() }}
{%- set a, b = [1, 2] %}{{ a }}{{ b }}{% for k, v in {'p': 1}.items() %}{{ k }}{{ v }}{% endfor %}
{%- set messages = messages[1:] %}{{ messages|length }}
{%- if not tools is defined %}{% set tools = 1 %}{% endif %}
{%- set add_generation_prompt = false %}{{ add_generation_prompt }}{{ strftime_now is defined }}
""",
    "white space": """  {% for i in range(3) %}
    {% if i %}
  {{ i }}
{%- endif %}
{% endfor %}
 {{- 1 -}}
 {{ 2 }}
""",
    "lazy results": """
{%- set user = messages|selectattr('role', 'equalto', 'user') %}{{ 'some' if user else 'none' }}
{{- user|list|length }}{{ user|list|length }}{{ 'some' if messages|selectattr('x') else 'none' }}
{%- set roles = messages|map(attribute='role') %}{% for r in roles %}{{ r }}{{ loop.index }}{% endfor %}
{{- roles|join }}{{ 'user' in messages|map(attribute='role') }}{{ messages|map(attribute='role')|unique|join }}
""",
}


@pytest.mark.usefixtures("fixed_date")
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_templates_work_as_in_plain_jinja(name: str) -> None:
    for messages, tools in itertools.product(CHATS.values(), (None, TOOLS)):
        expected = reference(FEATURES[name]).render(messages=with_thinking(messages), tools=tools)
        assert ChatTemplate(FEATURES[name]).render(messages, tools=tools) == expected
