"""Malicious chat templates: endless work, unbounded memory, deep recursion, sandbox escapes.

They form families: operations times the texts, values or places to which they apply.  As a program, this module
renders all of them in one thread and reports the slowest:

    python -m tests.localllm.chat.hostile_templates [BUDGET [EVERY]]

BUDGET uses the units of `localllm.chat.sandbox.BUDGET`; only every EVERYth item of each product is rendered.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
import threading
import time
from collections.abc import Iterator

if sys.platform == "linux":
    import resource

from localllm.chat import ChatTemplate, sandbox
from localllm.errors import TemplateError

TEXTS = {
    "letters": "a",
    "words": "ab ",
    "lines": "\n",
    "tags": "<&'\">",
    "zeros": "\0",
    "umlauts": "ß",
    "Greek": "ΐ",
    "emoji": "🙂",
    "digits": "9",
}
"""Repeated content of the message."""

# Operations on a long text x; HUGE is a large number.
ON_TEXTS = """
    x|sort; x|unique|list; x|list; x|reverse|list; x|map('upper')|list; x|select('in', x)|list; x|upper
    x|lower|upper; x|title; x.title(); x|capitalize; x|escape; x|e|e|e|e; x|trim; x|trim(x); x.strip(x)
    x.lstrip(x[1:]); x.rstrip(x ~ 'b'); x.split(); x.split(x[0]); x.split(x); x.rsplit(x[:900]); x.splitlines()
    x.replace('', x); x.replace(x[0], x); x|replace(x[0], '<' * 1000); x.join(x); x|join(x); x.find(x[1:])
    x.rfind('b' ~ x[:999]); x.count(''); x.index(x); x.count(x[:1200] ~ 'c'); x in x ~ 'b'; (x ~ 'b') in x
    x|indent(1000); x|indent(x, true, true); x * 1000; x ~ x ~ x; [x] * 1000000; (x,) * 100000000; x|tojson
    [x, '🙂']|tojson; [x, '🙂']|tojson(ensure_ascii=true); [x, '🙂']|string; x|int; x|float; x|int(0, 36); x|abs
    x|batch(1)|list; x|groupby(0); x|center(HUGE); x.center(HUGE); x|format(x); x % x; x.format(x); x.encode()
    x|wordwrap(1); x|urlize; x|striptags; x|random; x|attr('upper'); x|xmlattr; x|pprint; x[::-1]; x[x]
    x[::2] ~ x[1::2]; {x: x}[x ~ 'c']; {}[x].y; dict([(x, x)]); namespace(x); namespace()[x].y
    namespace()['_' ~ x].y; x is divisibleby x; x is odd; x|max; x|min; x|first; x|last; x|length; x|sum
    x|map(attribute=x)|list; [1]|map(x)|list; [1]|select(x)|list; [x]|selectattr(x)|list; raise_exception(x)
    raise_exception([x, x]); strftime_now(x); x|default(x)|string; x|dictsort; x|items|list; x|slice(HUGE)|list
    x|truncate(HUGE); x.zfill(HUGE); x.ljust(HUGE); x.expandtabs(HUGE); x.partition(x); x.translate({97: x})
    ('{0}' * 400).format(x); x.casefold(); x == x ~ ''; x < x ~ 'b'; x.startswith(x); x.endswith((x, x))
"""
# Operations that a template repeats on its own result g, by the initial value.
GROWING = {
    "'a'": """
    g ~ g; g + g; g * 2; g|replace('a', 'aa'); g.replace('', 'b'); [g, g]|join; g.join([g, g, g])
    g|indent(9, true) ~ g; (g ~ '<')|escape; [g]|string; [g]|tojson; {g: g}|string; '%s%s' % (g, g)
    '%s%s'|format(g, g); '{0}{0}'.format(g); g|upper ~ g; g|list|join(g); (g ~ g)[::-1]; (g ~ g)|reverse
""",
    "[1]": """
    g + g; [g, g]; (g, g); {'a': g, 'b': g}; dict(a=g, b=g); g * 2; [g] + [g]; [g, g|string]; [g] * 2
    [g]|map('list')|list; {'a': g}.items()|list; [g, [g]|first]; g|map('string')|list + g; {'a': g}|dictsort
    [g, g]|sort; [g, g]|unique|list; [g, g]|map('tojson')|list; [g, g]|max; namespace(a=g, b=g); [g ~ g]
    g|batch(2, g)|list; g|slice(2, g)|list; dict.fromkeys([1, 2], g); [g]|groupby(0)|list; [g, g]|sum(start=[])
    [g == g ~ '', g]; [[g] == [[1]], g]; [g in [[g]], g]; [{'a': g} == {'a': [g]}, g]; (g|list, g|list)
    [g, messages]; {'k': (g, g)}; [(g, g)|first, (g, g)]; ({'a': g}.values()|list) * 2
""",
    "10": "g * g; g ** 2; g ** g; g + g; g * 1000; -g * g; g * 1.5; g|string|int * g; (g|string ~ '0')|int",
}
# Ways to nest g once per iteration of a loop; the last ones double it.
NESTING = """
    [g]; (g,); {'a': g}; [g]|list; [g] + []; namespace(a=g); dict(a=g); [[g], g][:1]; ({'a': g}.items()|list)[0]
    g|map('string'); g|select; g|reject('none'); g|batch(1); g|unique; g|reverse; g|map('default', 1)
    [g]|map('list'); g|selectattr('a', 'undefined'); g|rejectattr('a'); g|map(attribute='a'); g|slice(1)
    {'a': g}.items(); [g, 1]|map('first'); [g]|first|default([g]); {'a': g}.get('b', [g]); (1, g)[1:]
    (g|list).index; [g, g]; (g, g); {'a': g, 'b': g}; (g|list) * 2
"""
# Operations for which a nested g may be expensive.
ENDS = """
    g; g|string|length; g|tojson; g == [[1]]; g == g|list; g in [g]; [1] in g; g|list|length; g|join; [g, g]|sort
    {g: 1}; g is in g; [g]|unique|list; g|map('list')|list; g|max; g.a.a.a; g|sum; [g, [g]]|map('tojson')|list
    {}[g]; {}[g].x; g < [[2]]; {}.get(g); dict([(g, g)]); [g]|select('eq', [g])|list; [g]|select('in', [[g]])|list
    raise_exception(g); g in {}; g in {}.keys(); g in {}.items(); (g, 1) in {}.items(); [g] - {}.keys()
    [1]|map(g)|list; [1]|reject(g)|list; {}[namespace(a=g)].x; namespace({'__name__': g, '__self__': ''})()
    [1]|map(attribute=g)|list; [1]|tojson(indent=g); 'a'.replace('a', g); 'a'.startswith(g); range(g); messages[g:]
    5|round(g); 'a'|indent(g); messages|sort(attribute=g)
"""
# Loops over q = range(50000)|list whose iterations may be slow.
QUADRATIC = """
    range(50000, 99999)|select('in', q)|list; q|reject('in', q)|list; q|map('string')|select('in', q|join)|list
    q|select('eq', q)|list; q|selectattr('real', 'in', q)|list; q|map('default', q)|map('sum')|list
    q|groupby('real'); q|map('string')|map('replace', '1', '2' * 999)|list; q|map('indent', 9999)|list
    q|map('center', 9999)|join; q|map('round', 15)|sum; q|map('attr', 'real')|list
    q|map('string')|map('format', 1)|list; q|map('map', 'string')|list; [q] * 9999; q|sort(attribute='a.b')
    ([q] * 999)|map('list')|list; ([q] * 999)|map('sort')|list; ([q] * 999)|map('join')|list
    ([q] * 999)|map('length')|sum; ([q] * 999)|tojson; ([q] * 999)|string; ([q] * 999)|sort; ([q] * 999)|unique|list
    ([q] * 999)|max; ([q] * 999)|map('tojson')|list; ([[q] * 99] * 99) == ([[q] * 99 + []] * 99); q|batch(3)|list
    q|slice(3)|list; q|random; q|map('filesizeformat')|list
    q|map(attribute='a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a')|list; q|sort(attribute='a,b,c,d,e,f,g,h,i,j')
    q|map('int', 0, 36)|list; q|map('#pay')|list; [-999999999]|map('#pay')|list
    q|map('abs')|map('float')|map('string')|map('upper')|map('title')|join
    ('x' * 9999)|map('string')|map('list')|list
"""
# Bodies of a loop of 99,999 iterations over i; x is a long text, f a macro that prints its argument.
EVERY_TURN = """
    q|length + (q|sum); q|max; q|join|length; q == q + [1]; (q + [1])|first; q[::-1]|first; q|sort|first; i in q
    q.index(i); q|reverse|first; q|tojson|length; q|string|length; q|list|length; q|unique|first; x.find('y')
    x.count('xy'); x[1:]; x.split('b')|length; x|upper|length; x|trim; x|tojson(indent=-10**18); messages|tojson
    q|map('string')|first; q|select|first; {'a': 1, 'b': 2, 'c': [1, 2, 3]}; [i, [i, [i, [i]]]]
    strftime_now('%c' * 99); f(i); range(9999); f(f(f(i))); dict(a=i, b=i); namespace(a=i)
    ('ab' ~ i)|replace('a', 'b' * 999); nothing.nothing; [nothing, nothing]; i|round(2)|string|float|int; f(*[i])
    ('a' * 1200 ~ 'b' ~ 'a' * 1200).find('a' * 600 ~ 'c' ~ 'a' * 600); ('a' * 2499).rfind('b' ~ 'a' * 999)
    [x.upper, {}.get]; ('a' * 2400).count('a' * 999 ~ 'b'); x.strip(x[:9]); x in x; messages[0].content.strip
    messages[0].nothing; [[], [], [[]]]
"""
# Values that a template keeps forever, where g is everything kept before.
KEPT = """
    {1: {2: {3: {4: {5: g}}}}}; [[], [], [], [[[[[]]]]], g]; namespace(a=1, b=2, l=g); [g, i * 1.5, i * 99999]
    [g, loop]; [g, messages.x, y, z]; [g, i ~ '🙂', i|string ~ 'a']; g + [i]; [g, 'a'.upper, {}.get]; [g, f, f]
    [g, range(9)]; [g, [i]|map('string')]; [g, messages[:]]; [g, 'ab🙂'|list]; [g, 'a b c'.split()]
    [g, {'a': i}.items()]; (g|string)[-9999:] ~ i
"""
ESCAPES = """
    ''.__class__.__mro__[1].__subclasses__(); ().__class__.__base__.__subclasses__(); ''|attr('__class__')
    dict.mro(); raise_exception.__globals__.x; ''['__cla' ~ 'ss__'].mro()
    (messages|map(attribute='__class__')|first).mro(); namespace.__init__.__globals__; range.func.__globals__
    strftime_now.__code__.x; self._TemplateReference__context.x; self.__init__.__globals__; messages.append(1)
    messages.sort(); messages[0].update({'role': 'x'}); messages[0].pop('role'); messages[0].setdefault('x', 1)
    messages.clear(); messages.__len__(); '{0.__class__}'.format(1); ''.format.__self__.x.y
    '{a.__class__}'.format_map({'a': ''}); ('{0.__class__}'|safe).format(''); '%c'.__mod__(1); loop.__init__.x
    cycler(1); (messages|map('string')).gi_frame.f_globals; dict.__subclasses__(); 'a'.encode(); (5).bit_length()
    lipsum(); 'a'.translate({97: 'b'}); lipsum.__globals__.os; cycler.__init__.__globals__.os; joiner.__init__.x
    ''.upper.__self__.x; ''.upper.func.x; range.args.x; {}.get.keywords.x; nothing.__class__.x.y
    nothing._fail_with_undefined_error(); [].index(1); messages|#pay; messages|map('#key')|list|x; context.x
    environment.x.y; __builtins__.x; namespace(__class__=1).__class__.x; caller(); varargs.x
    messages|map('attr', '__class__')|list; messages|selectattr('__class__.__mro__')|first|x; [].__class__()
    {}.__class__(); joiner(); raise_exception.func('x'); messages[0].__class__.x; messages.copy(); {}.copy()
"""


def _each(n: int, body: str, condition: str = "") -> str:
    return f"{{% for i in range({n}) {condition} %}}{body}{{% endfor %}}"


ALONE = {
    "issue 1": "{% set ns=namespace(g=[1]) %}"
    + _each(20000, "{% set ns.g=ns.g|map('string') %}")
    + "{{ ns.g|list|length }}",
    "issue 2": "{% set q=range(50000)|list %}{{ range(50000,99999)|select('in',q)|list|length }}",
    "huge range": "{{ range(10**9) }}",
    "loops in loops": _each(99999, _each(99999, "")),
    "loops in loops in loops": _each(999, _each(999, _each(999, "x"))),
    "empty loops": _each(99999, _each(99999, "", "if false")),
    "slow test": "{% set q = range(99999) %}" + _each(99999, "", "if i in q and false"),
    "text loop": "{% for c in 'ab' * 9999999 %}{{ c }}{% endfor %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "stored loop": "{% set n = namespace(l=[1]) %}"
    + _each(9999, "{% for x in n.l %}{% set n.l = loop %}{% endfor %}"),
    "loop in loop": _each(9, "{% for x in loop %}{% for y in loop %}{{ y }}{% endfor %}{% endfor %}"),
    "self macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}",
    "argument macro": "{% macro f(x) %}{{ x(x) }}{% endmacro %}{{ f(f) }}",
    "default macro": "{% macro f(x=f()) %}{{ x }}{% endmacro %}{{ f() }}",
    "doubling macro": "{% macro f(n) %}{{ n and f(n-1) ~ f(n-1) }}{% endmacro %}{{ f(50) }}",
    "tree macro": "{% macro f(n) %}" + _each(9, "{{ f(n - 1) if n }}") + "{% endmacro %}{{ f(60) }}",
    "caller": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{% call f() %}x{% endcall %}",
    "kept callers": "{% set n = namespace(c=range) %}{% macro f() %}{% set n.c = caller %}{% endmacro %}"
    + _each(9999, "{% set c = n.c %}{% call f() %}{{ c() }}{% endcall %}")
    + "{{ n.c() }}",
    "many macros": "{% set n = namespace(l=[]) %}"
    + _each(99999, "{% macro f(a=1, b=2) %}{{ n }}{% endmacro %}{% set n.l = [n.l, f] %}"),
    "copies": "{% set x = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(99)),
    "printed again": "{% set x = '🙂' * 99999 %}" + _each(99999, "{{ x }}"),
    "literal": _each(99999, "x" * 9999),
    "kept literal": _each(99999, "{% set x %}" + "x" * 9999 + "{% endset %}"),
    "wide literal": _each(999, "x" * 99999) + "🙂",
    "filter block": _each(9999, "{% filter replace('a', 'b' * 999) %}" + "a" * 99 + "{% endfilter %}"),
    "capture": "{% set n = namespace(s='a') %}"
    + _each(99, "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}"),
    "with": _each(99999, "{% with a = range(9999), b = a %}{% endwith %}"),
    "endless namespace": "{% set n = namespace() %}{% set n.n = n %}{{ n == n }}{{ [n]|length }}{{ n }}",
    "same hashes": "{% set n = namespace(l=[0]) %}"
    + _each(9999, "{% set n.l = n.l + [i * (2**61 - 1)] %}")
    + "{{ n.l|unique|list|length }}",
    "literal hashes": "{{ [" + ",".join(str(i * (2**61 - 1)) for i in range(4000)) + "]|unique|list|length }}",
    "key hashes": _each(999, "{% set d = {" + ",".join(f"{i * (2**61 - 1)}: 1" for i in range(2_500)) + "} %}"),
    "read hashes": _each(999, "{% set d = {" + ",".join(f"'{i * (2**61 - 1)}'|int:1" for i in range(1500)) + "} %}"),
    "pair hashes": "{% set n = namespace(l=[]) %}"
    + _each(2000, "{% set n.l = n.l + [((i * (2**61 - 1) ~ '')|int, 1)] %}")
    + _each(99, "{% set d = dict(n.l) %}"),
    "power": "{{ 10 ** 10 ** 8 }}",
    "odd powers": "{{ 10 ** -99999999 }}{{ 2 ** -1.5 }}{{ (-8) ** 0.5 }}",
    "factorial": "{% set n = namespace(x=1) %}" + _each(99999, "{% set n.x = n.x * (i + 1) %}") + "{{ n.x }}",
    "many digits": "{{ '9' * 4000 }}{{ ('9' * 4000)|int * 3 }}",
    "hexadecimal": "{{ ('f' * 999)|int(0, 16) }}",
    "float to int": "{{ '1e308'|int }}{{ '1e308'|float * 10 }}{{ 'inf'|float|int }}{{ 'nan'|float }}",
    "no number": "{% set n = 'nan'|float %}{% for i in range(9) %}{{ [1]|tojson(indent=n) }}{% endfor %}",
    "no width": "{% set n = 'nan'|float %}{{ 'a'|indent(n) }}{{ 5|round(n) }}{{ 'a' * n }}",
    "infinite": "{% set n = 'inf'|float %}{{ n|int }}{{ n ** n ** n }}{{ 'a'|indent(n) }}",
    "round": "{{ 5|round(-10**9) }}",
    "round up": "{{ 5|round(10**9, 'ceil') }}",
    "round text": "{{ 'a'|round(9, 'ceil') }}",
    "text remainder": "{{ '%999999999d' is divisibleby 7 }}",
    "odd text": "{{ '%999999999d' is odd }}",
    "mapped odd": "{{ ['%999999999d']|select('even')|list }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent key": "{{ '%(a)999999999d' % {'a': 1} }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format of attributes": "{{ '{0.__class__}'.format(1) }}{{ '{0[0]}'.format(messages) }}",
    "format in format": "{{ '{:{}}'.format(1, 999999999) }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "JSON indent": "{{ [[[[1]]]]|tojson(indent=999999999) }}",
    "JSON indents": "{{ ([[[[1]]]] * 99999)|tojson(indent='                ') }}",
    "JSON separators": "{{ ([1] * 99999)|tojson(separators=(',' * 99999, ':')) }}",
    "JSON of macros": "{% macro f() %}{% endmacro %}{{ [f]|tojson }}{{ {'a': range}|tojson }}",
    "JSON default": "{{ [1]|tojson(default=range) }}",
    "date": "{{ strftime_now('%999999999d') }}{{ strftime_now('%c' * 99999) }}",
    "star": "{{ range(*range(99999)) }}",
    "stars": "{{ dict(**{'a' * 99999: 1}) }}",
    "sum of lists": "{{ ([[1]] * 9999)|sum(start=[]) }}",
    "set of keys": "{{ dict(a=1).keys() - dict(b=1).keys() }}",
    "unpacking": _each(9999, "{% set a, b = range(9999) %}"),
    "joiner": "{% set j = joiner('x' * 99999999) %}" + _each(999, "{{ j() }}"),
    "cycler": "{% set c = cycler(1, 2) %}" + _each(9**9, "{{ c.next() }}"),
    "lipsum": "{{ lipsum(n=99999999) }}",
    "cycle": _each(9, "{{ loop.cycle(1, 2) }}{{ loop.changed(messages) }}"),
    "kept method": "{% set f = (messages[0].content * 9).strip %}" + _each(9999, "{{ f(messages[0].content) }}"),
    "default values": "{% macro f(a=[" + "1," * 7_000 + "]) %}{% endmacro %}" + _each(99999, "{% set x = f() %}"),
    "long condition": _each(99999, "{% if " + "i and " * 60 + "i %}{% endif %}"),
    "many branches": _each(99999, "{% if 0 %}" + "{%elif i==0.5%}" * 800 + "{% endif %}"),
    "long test": _each(99999, "", "if " + "i and " * 60 + "false"),
    "long literals": _each(99999, "{% set x = [" + "1,'a'," * 3_500 + "] %}"),
    "long names": _each(99999, "{% set x = [" + "nothing," * 7_000 + "] %}"),
    "long call": "{% macro f() %}{{ varargs|length }}{% endmacro %}"
    + _each(99999, "{% set x=f(" + "i," * 7_000 + ") %}"),
    "include": "{% include 'x' %}",
    "import": "{% import 'os' as os %}",
    "from import": "{% from 'os' import system %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block x %}{{ self.x() }}{% endblock %}",
    "autoescape": "{% autoescape 'a' * 10**10 %}{% endautoescape %}",
    "debug": "{% debug %}",
    "do": "{% do messages.append(1) %}",
    "trans": "{% trans %}x{% endtrans %}",
    # too much for a parser or compiler
    "parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "some parentheses": "{{ " + "(" * 80 + "1" + ")" * 80 + " }}",
    "lists": "{{ " + "[" * 90 + "]" * 90 + " }}",
    "many lists": "{{ " + "[" * 9_000 + "]" * 9_000 + " }}",
    "dicts": "{{ " + "{1:" * 90 + "1" + "}" * 90 + " }}",
    "attributes": "{{ x" + ".a" * 6_000 + " }}",
    "items": "{{ x" + "[0]" * 5_000 + " }}",
    "calls": "{{ f" + "()" * 5_000 + " }}",
    "not": "{{ " + "not " * 6_000 + "1 }}",
    "minus": "{{ " + "-" * 9_000 + "1 }}",
    "plus": "{{ " + "1+" * 6_000 + "1 }}",
    "powers": "{{ " + "1**" * 6_000 + "1 }}",
    "tildes": "{{ " + "1~" * 6_000 + "1 }}",
    "ands": "{{ " + "1 and " * 4_000 + "1 }}",
    "else": "{{ " + "1 if 0 else " * 2_000 + "1 }}",
    "filters": "{{ x" + "|list" * 4_000 + " }}",
    "tests": "{{ x" + " is none" * 3_000 + " }}",
    "comparisons": "{{ " + "1<" * 6_000 + "1 }}",
    "if": "{% if 1 %}" * 1_000 + "{% endif %}" * 1_000,
    "some ifs": "{% if 1 %}" * 60 + "{% endif %}" * 60,
    "elif": "{% if 0 %}" + "{%elif 0%}" * 3_000 + "{% endif %}",
    "for": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "macros in macros": "{% macro f() %}" * 500 + "{% endmacro %}" * 500,
    "sets": "{% set x %}" * 500 + "{% endset %}" * 500,
    "call blocks": "{% call f() %}" * 200 + "{% endcall %}" * 200,
    "generations": "{% generation %}" * 200 + "{% endgeneration %}" * 200,
    "long number": "{{ " + "9" * 10_000 + " }}",
    "long hexadecimal": "{{ 0x" + "f" * 100_000 + " }}",
    "long float": "{{ 1." + "9" * 100_000 + "e99999 }}",
    "underscores": "{{ 1" + "_1" * 50_000 + "x }}",
    "characters": "x" * 10**7,
    "tokens": "{{ a }}" * 10_000,
    "names": "".join(f"{{%set a{i}=b{i}%}}" for i in range(2_000)),
    "comments": "{#" * 50_000,
    "raw": "{% raw %}" * 10_000,
    "spaces": "{%" + " " * 100_000,
    "quotes": "{{ '" * 20_000,
    "backslashes": "{{ '" + "\\" * 100_001 + "' }}",
    "arguments": "{{ f(" + "1," * 6_000 + ") }}",
    "keywords": "{{ dict(" + ",".join(f"a{i}=1" for i in range(3_000)) + ") }}",
    "long attribute": "{{ x." + "a" * 100_000 + ".b }}",
    "Unicode names": "{{ ﬁ }}{{ fi }}{{ 𝒙 }}{% set ª = 1 %}",
    "surrogates": "{{ '\\ud800' }}\ud800",
    "zeros": "\0{{ '\0' }}{{ '\\x00' }}",
}
_REPEAT = (
    "{{% set n = namespace(g={start}) %}}{{% for i in range({times}) %}}{{% set g = n.g %}}{{% set n.g = {step} %}}"
    "{{% endfor %}}{{% set g = n.g %}}"
)


def operations(text: str) -> list[str]:
    return [operation for line in text.strip().splitlines() for operation in line.strip().split("; ")]


def hostile_templates(every: int = 1) -> Iterator[tuple[str, str, str]]:
    """Yield names and sources, and the repeated content of the message."""
    for repeated, step in itertools.islice(itertools.product(TEXTS, operations(ON_TEXTS)), 0, None, every):
        operation = step.replace("HUGE", "10**10")
        yield f"{step}, x of {repeated}", "{% set x = messages[0].content %}{{ " + operation + " }}", TEXTS[repeated]
    for step, end in itertools.islice(itertools.product(operations(NESTING), operations(ENDS)), 0, None, every):
        times = 60 if step.count("g") - step.count("get") > 1 or "* 2" in step else 20_000
        yield f"{end}, g from {step}", _REPEAT.format(start="[1]", times=times, step=step) + "{{ " + end + " }}", "a"
    for start, steps in GROWING.items():
        for step in operations(steps):
            source = _REPEAT.format(start=start, times=100, step=step)
            yield f"growing {step}, from {start}", source + "{{ g }}{{ g|tojson }}", "a"
    for expression in operations(QUADRATIC):
        yield expression, "{% set q = range(50000)|list %}{{ (" + expression + ")|length }}", "a"
    start = "{% macro f(x) %}{{ x }}{% endmacro %}{% set q = range(9999)|list %}{% set x = 'ab ' * 9999 %}"
    for expression in operations(EVERY_TURN):
        yield f"always {expression}", start + _each(99_999, "{% set y = " + expression + " %}"), "a"
    for step in operations(KEPT):
        kept = _REPEAT.format(start="[]", times=99_999, step=step)
        yield f"kept {step}", "{% macro f() %}{% endmacro %}" + kept + "{{ g|length }}", "a"
    for expression in operations(ESCAPES):
        yield f"escape {expression}", "{{ " + expression + " }}", "a"
    for name, source in ALONE.items():
        yield name, source, "a"


def main(budget: int = sandbox.BUDGET, every: int = 1) -> None:
    sandbox._Meter.remaining = budget
    n_characters = 5_000_000 * budget // sandbox.BUDGET
    times: dict[str, float] = {}
    problems: list[str] = []

    def work() -> None:
        for name, source, repeated in hostile_templates(every):
            faulthandler.dump_traceback_later(300, exit=True)
            content = repeated * (n_characters // len(repeated.encode()))
            start, end = time.thread_time(), ""
            try:
                ChatTemplate(source).render([{"role": "user", "content": content}])
            except TemplateError as error:
                end = str(error)
            except BaseException as error:
                problems.append(f"{name}: {error!r:.200}")
            if "MemoryError" in end or "\n" in end or len(end) > 300:
                problems.append(f"{name}: {end:.300}")
            times[name] = time.thread_time() - start

    before = resident_megabytes()
    if before:  # prevents exhausting the memory; threads reserve more than they use
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    threading.stack_size(512 << 10)  # the smallest thread stack of some systems
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if (growth := resident_megabytes() - before) > 300:
        problems.append(f"it took {growth} MB")
    for name, seconds in sorted(times.items(), key=lambda item: -item[1])[:8]:
        print(f"{seconds:.2f} s  {name:.100}")
    print(f"{len(times)} templates, {sum(times.values()):.1f} s, {growth} MB")
    sys.exit("\n".join(problems) or 0)


def resident_megabytes() -> int:
    """Return the peak memory of this process in bytes; 0 if the system does not report it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10 if sys.platform == "linux" else 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
