"""Renders chat templates, which are untrusted programs in model files.

jinja2's sandbox denies access to private attributes and changes to the variables.  In addition, only the statements,
methods, functions, filters and tests below exist, and all work is paid for in advance.  Each block of statements pays
for its nodes when it is entered (`_Rewriter` adds the payment).  Each operation pays by the size of its operands.
Lazy values do not exist.  So a render ends within `BUDGET`, in any thread, and after the same steps on every machine.

Settings and extra names are the same as in Hugging Face transformers (``utils/chat_template_utils.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from itertools import islice
from operator import length_hint
from string import Formatter
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from localllm.cancellation import check_cancelled

BUDGET = 200_000_000
"""Limit of one render in units.  A unit is a byte of memory or about 5 ns; an operation costs the larger of both."""

# Longer templates are rejected, because compiling them takes too long.  The longest known templates are GigaChat
# 3.5's with 40,000 characters, and gpt-oss' with 17,000 characters and 2,700 tokens.
_MAX_CHARACTERS, _MAX_TOKENS, _MAX_NESTED_NODES = 128 << 10, 16 << 10, 100
_MAX_DEPTH = 64  # of nested data, and of nested macro calls
_MAX_INT_BITS = 64  # longer integers as dict keys could all have the same hash


class RefusedError(Exception):
    """The template called ``raise_exception``.  The message is the template's."""


def compile_template(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Return a template for `render`, and the names of the variables that it reads.  Does not run the template."""
    environment = _Environment()
    n_tokens = len(list(islice(environment.lex(source[: _MAX_CHARACTERS + 1]), _MAX_TOKENS + 1)))
    if len(source) > _MAX_CHARACTERS or n_tokens > _MAX_TOKENS:
        raise ValueError(f"it is longer than {_MAX_CHARACTERS:,} characters or {_MAX_TOKENS:,} tokens")
    rewriter = _Rewriter()
    code = environment.compile(rewriter.visit(environment.parse(source)))
    return jinja2.Template.from_code(environment, code, environment.make_globals(None)), frozenset(rewriter.names)


def render(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    """Render a template with variables of plain data (dicts, lists, strings, numbers, booleans, ``None``)."""
    token = _meter.set(_Meter())
    try:
        return "".join(template.root_render_func(template.new_context(dict(variables))))
    finally:
        _meter.reset(token)


# --- paying


#: Units between two checks for cancellation, a few milliseconds.
_CHECKED = 1_000_000


class _Meter:
    remaining = BUDGET
    depth = 0  # of macro calls


_meter: ContextVar[_Meter] = ContextVar("template_meter")


def _pay(cost: int) -> bool:
    meter = _meter.get()
    before = meter.remaining
    meter.remaining -= max(cost, 0)
    if meter.remaining // _CHECKED != before // _CHECKED:
        check_cancelled()
    if not meter.remaining >= 0:  # also true for NaN
        raise SecurityError("it asks for far more work or memory than messages call for")
    return True


_CONTAINERS = frozenset({list, tuple, dict, type({}.keys()), type({}.values()), type({}.items())})
_ITERATOR: Any = type(iter([]))  # replaces jinja2's lazy results: true even if empty, and usable once


def _size(value: Any, depth: int = 0) -> int:
    """Return the number of characters in ``value`` plus 16 per element.  Shared elements count every time."""
    class_ = type(value)
    if class_ is str:
        return 16 + len(value)
    if class_ in _CONTAINERS:
        if depth == _MAX_DEPTH:
            raise SecurityError("it nests data too deeply")
        _pay(64 + 64 * len(value))  # for this walk
        size = 16 + sum(_size(item, depth + 1) for item in value)
        return size + sum(_size(item, depth + 1) for item in value.values()) if class_ is dict else size
    if value is None or isinstance(value, int | float | Undefined):
        return 16 + (value.bit_length() if isinstance(value, int) else 0)
    raise TypeError(f"{class_.__name__!r} is not data")


def _pay_size(factor: int, *operands: Any) -> None:
    _pay(64 + factor * _size(operands))


def _pay_steps(value: Any, *args: Any, **kwargs: Any) -> None:
    """Pay one step per item, which may include a filter's look-up of a dotted attribute."""
    if type(value) not in _CONTAINERS and not isinstance(value, Undefined | str | int | float | None):
        raise TypeError(f"{type(value).__name__!r} object is not iterable")
    n_characters = sum(len(_short(arg)) for arg in (*args, *kwargs.values()) if isinstance(arg, str))
    _pay(64 + length_hint(value) * ((96 if isinstance(value, str) else 24) + 64 * n_characters))


def _pay_sorting(value: Any, *args: Any, **kwargs: Any) -> None:
    _pay_steps(value, *args, **kwargs)
    _pay(160 * len(value))  # for comparing keys
    _pay_size(8 + 4 * len(value).bit_length(), value)


def _pay_search(text: str, needle: str) -> None:
    _pay(len(text) * (2 + min(len(needle), 1250) // 8))  # a search for longer needles from the left takes linear time


# --- checked values


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__!r} is not a number")
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise SecurityError("it computes with huge numbers")
    return value


def _short(value: Any, limit: int = 1000) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > limit:
        raise SecurityError(f"it gives {len(value):,} characters or items where few belong")
    return value


def _key(value: Any) -> Any:
    if not isinstance(value, str | int | float | Undefined | None):  # hashing or formatting may never end
        raise TypeError(f"{type(value).__name__!r} cannot be a key")
    return _number(value) if isinstance(value, int) else value


def _text(value: Any) -> str:
    if type(value) is not str:
        _pay_size(40, value)  # a character can take 10, of 4 bytes
    return str(value)


def _listed(value: Any) -> Any:
    return list(value) if type(value) is _ITERATOR and _pay(24 * length_hint(value)) else value


# --- methods and functions

_TEXT_METHODS = (
    *("capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isdigit", "islower"),
    *("isspace", "isupper", "join", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rfind", "rsplit"),
    *("rstrip", "split", "startswith", "strip", "title", "upper"),
)


def _text_method(name: str, text: str, *args: Any, **kwargs: Any) -> Any:
    args = tuple(map(_listed, args))
    operands = [text, *args, *kwargs.values()]
    _pay_size(8, operands)
    needle = next((operand for operand in operands[1:] if isinstance(operand, str)), "")
    _pay_search(text, _short(needle) if name in ("rfind", "rsplit", "strip", "lstrip", "rstrip") else needle)
    if name == "join":
        _pay_steps(args[0], text)
    elif name == "format":
        return _format(text, *args, **kwargs)
    elif name == "replace":
        _pay(4 * text.count(needle) * len(args[1]))
    elif name in ("split", "rsplit"):
        _pay(96 * (text.count(needle) if needle else len(text) // 2))
    return getattr(text, name)(*args, **kwargs)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    values = [_text(arg) for arg in args]
    keywords = {key: _text(value) for key, value in kwargs.items()}
    longest = max(map(len, (*values, *keywords.values())), default=0)
    for _, field, form, conversion in _short(list(Formatter().parse(text))):
        if form or conversion or not (field or "0").replace("_", "0").isalnum():
            raise SecurityError("it formats text with more than plain '{}' or '{name}'")
        _pay(64 + 4 * longest)
    return text.format(*values, **keywords)


def _dict(*pairs: Any, **more: Any) -> dict[Any, Any]:
    _pay_size(64, pairs)
    _pay(512 + 64 * len(more))
    return dict(*pairs, **more)


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedError(_text(message)[:1000])


_GLOBALS: dict[str, Any] = {
    "dict": _dict,
    "namespace": lambda *pairs, **more: Namespace(_dict(*pairs, **more)),
    "raise_exception": _raise_exception,
    "range": lambda *bounds: list(range(*bounds)) if _pay(40 * len(range(*bounds))) else [],
    "strftime_now": lambda form: datetime.now().strftime(_short(form)) if _pay(64 * len(form)) else "",
}


# --- filters and tests


def _filter(function: Callable[..., Any], pay: Callable[..., object] = lambda *_, **__: None) -> Callable[..., Any]:
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context  # needing the context keeps it from being run by the compiler
    def call(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        value = _listed(value)
        pay(value, *args, **kwargs)
        owner = [context if passes == "context" else context.environment] if passes else []
        result = function(*owner, value, *args, **kwargs)
        return iter(list(result)) if hasattr(type(result), "__next__") else result

    return call


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    text, columns = _text(value), len(width) if isinstance(width, str) else _number(width)
    _pay(64 * len(text))
    _pay(8 * len(text.splitlines()) * max(columns, 1))
    return FILTERS["indent"](text, width, first, blank)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(_number(precision)) > 20:
        raise SecurityError("it computes with huge numbers")
    return FILTERS["round"](_number(value), precision, method)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as in transformers; jinja2's filter would escape for HTML."""
    columns = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
    if columns > 16 or any(len(separator) > 16 for separator in separators or ()):
        raise SecurityError("it asks for JSON of absurd width")
    _pay_size(40 + 4 * columns, value)  # a character can take 6, of 4 bytes, and a part be _MAX_DEPTH deep
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_FILTERS: dict[str, Any] = {
    **{name: _filter(FILTERS[name], _pay_steps) for name in ("count", "first", "items", "last", "length")},
    **{name: _filter(FILTERS[name], _pay_steps) for name in ("map", "reject", "rejectattr", "reverse")},
    **{name: _filter(FILTERS[name], _pay_steps) for name in ("select", "selectattr")},
    **{name: _filter(FILTERS[name], _pay_sorting) for name in ("dictsort", "max", "min", "sort", "unique")},
    **{name: _filter(FILTERS[name], lambda value, *_, **__: _short(value)) for name in ("float", "int")},
    **{name: _filter(FILTERS[name]) for name in ("d", "default")},
    "abs": _filter(abs, _number),
    "capitalize": _filter(lambda value: _text_method("capitalize", _text(value))),
    "indent": _filter(_indent),
    "join": _filter(lambda value, d="": _text_method("join", _text(d), list(map(_text, value))), _pay_steps),
    "list": _filter(list, _pay_steps),
    "lower": _filter(lambda value: _text_method("lower", _text(value))),
    "replace": _filter(lambda value, *args: _text_method("replace", *map(_text, (value, *args[:2])), *args[2:])),
    "round": _filter(_round),
    "safe": _filter(_text),  # there is no escaping
    "string": _filter(_text),
    "sum": _filter(lambda value: sum(map(_number, value)), _pay_steps),
    "title": _filter(FILTERS["title"], partial(_pay_size, 64)),
    "tojson": _filter(_tojson),
    "trim": _filter(lambda value, chars=None: _text_method("strip", _text(value), chars)),
    "upper": _filter(lambda value: _text_method("upper", _text(value))),
    # Added by `_Rewriter`.  Templates cannot use these names.
    "#few": jinja2.pass_context(lambda context, value: _short(value, 100)),
    "#key": jinja2.pass_context(lambda context, value: _key(value)),
    "#pay": jinja2.pass_context(lambda context, cost: _pay(cost)),
    "#slice": jinja2.pass_context(lambda context, *bounds: slice(*bounds)),
}


def _test(name: str) -> Callable[..., Any]:
    function: Any = TESTS[name]

    def call(value: Any, *args: Any) -> Any:
        args = tuple(map(_listed, args))
        if name in ("divisibleby", "even", "odd"):  # their operator formats strings
            _number(value)
        if name == "in" and type(args[0]) is dict:
            _key(value)
        elif args:
            _pay_size(1, value, *args)  # comparing and hashing take at most a walk through both
            if name == "in" and isinstance(value, str) and isinstance(args[0], str):
                _pay_search(args[0], value)
        return function(value, *args)

    return call


_TESTS: Any = {name: _test(name) for name in TESTS.keys() - {"escaped", "filter", "lower", "test", "upper"}}


# --- the environment


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks text of the assistant.  It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    text = _text(value)
    _pay(64 + 5 * len(text))  # stored until all text is joined, and then copied
    return text


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        extensions = [_Generation, LoopControlExtension]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize)
        self.optimized = False  # otherwise the compiler would evaluate constant expressions
        self.filters, self.globals, self.tests = _FILTERS, _GLOBALS, _TESTS

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        if isinstance(obj, Namespace) and not attribute.startswith("_") and hasattr(obj, attribute):
            return getattr(obj, attribute)
        _pay(256)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:
        """Disables jinja2's ``str.format``, which `call` implements."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and isinstance(argument, str) and argument in obj:
            return obj[argument]
        _pay(192)
        if isinstance(argument, slice):
            _pay(8 * len(range(len(obj))[argument]))
            return obj[argument]
        return super().getitem(obj, _short(_key(argument)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The odd names leave every keyword free for the template, as in jinja2.
        owner = __obj.__self__ if isinstance(__obj, BuiltinMethodType) else None
        is_function = isinstance(__obj, BuiltinMethodType | FunctionType | MethodType)
        name = (__obj if is_function else type(__obj)).__name__
        if type(owner) is str and name in _TEXT_METHODS:
            __obj = partial(_text_method, name, owner)
        elif type(owner) is dict and name == "get":
            __obj = partial(lambda mapping, key, default=None: mapping.get(_key(key), default), owner)
        elif type(owner) is dict and name in ("items", "keys", "values"):
            pass
        elif not isinstance(__obj, Macro | Undefined) and __obj not in _GLOBALS.values():
            raise SecurityError(f"it calls {name!r}, which is not allowed")
        meter = _meter.get()
        if meter.depth == _MAX_DEPTH:
            raise SecurityError("it calls its macros without end")
        meter.depth += 1
        result = __context.call(__obj, *args, **kwargs)
        meter.depth -= 1
        return result

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return super().call_filter(_short(_key(name)), *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return super().call_test(_short(_key(name)), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        lengths = [len(operand) for operand in (left, right) if isinstance(operand, str | list | tuple)]
        if lengths:
            if operator not in "+*":
                raise SecurityError(f"it uses {operator!r} on text or lists")
            _pay(64 + 8 * sum(lengths) * max([1, *(factor for factor in (left, right) if isinstance(factor, int))]))
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            exponent = abs(_number(right)) if operator == "**" else 1
            if isinstance(_number(left), int) and exponent * abs(left).bit_length() > 4 * _MAX_INT_BITS:
                raise SecurityError("it computes with huge numbers")
        return super().call_binop(context, operator, left, right)


# --- the rewriter

_COSTS: dict[str, int] = {  # of all allowed nodes
    **dict.fromkeys(("And", "Assign", "Break", "Compare", "CondExpr", "Const", "Continue", "If", "Keyword"), 8),
    **dict.fromkeys(("Neg", "Not", "Operand", "Or", "Output", "Pos", "Scope", "Slice", "Template"), 8),
    "TemplateData": 8,
    **dict.fromkeys(("AssignBlock", "Concat", "FilterBlock", "Getattr", "Getitem", "NSRef", "Name", "With"), 64),
    **dict.fromkeys(("Add", "Div", "ExprStmt", "FloorDiv", "Mod", "Mul", "Pair", "Pow", "Sub", "Test"), 192),
    **dict.fromkeys(("Call", "CallBlock", "Dict", "Filter", "For", "List", "Macro", "Tuple"), 512),
}


def _cost(node: nodes.Node) -> int:
    """Return the cost of ``node`` without its blocks, which pay separately."""
    text = 5 * len(node.data) if isinstance(node, nodes.TemplateData) else 0
    return text + _COSTS[type(node).__name__] + sum(map(_cost, node.iter_child_nodes(exclude=("body", "else_"))))


def _through(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, lineno=node.lineno)


def _paying(node: nodes.Node, *blocks: nodes.Node) -> nodes.Filter:
    return _through("#pay", nodes.Const(64 + sum(map(_cost, blocks)), lineno=node.lineno))


class _Rewriter(NodeTransformer):
    """Rejects forbidden nodes, adds payments and checks, and collects the ``names`` of variables that are read."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        name = type(node).__name__
        if name not in _COSTS or getattr(node, "recursive", False) or getattr(node, "dyn_kwargs", None):
            word = {"For": "recursive loop", "Call": "**", "ScopedEvalContextModifier": "autoescape"}.get(
                name, name.lower()
            )
            raise TemplateSyntaxError(f"{word!r} is not allowed in chat templates", node.lineno)
        n_branches = len(getattr(node, "elif_", ()))  # Python nests each branch in the previous branch
        if self._depth + n_branches >= _MAX_NESTED_NODES:
            raise RecursionError
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        if (operands := getattr(node, "dyn_args", None)) is not None:
            cast(Any, node).dyn_args = _through("#few", operands)
        for field in ("body", "else_"):
            if (block := getattr(node, field, None)) or (field == "body" and block is not None):
                paying = _paying(node, *block, *getattr(node, "defaults", ()))
                setattr(node, field, [nodes.ExprStmt(paying, lineno=node.lineno), *block])
        return getattr(self, f"visit_{name}", lambda node: node)(node)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        if node.ctx == "load":
            self.names.add(node.name)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = _through("list", node.iter)
        if node.test is not None:
            node.test = nodes.And(_paying(node, node.test), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _through("join", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        return nodes.Pair(_through("#key", node.key), node.value, lineno=node.lineno)

    def visit_Slice(self, node: nodes.Slice) -> nodes.Node:
        start, stop, step = (bound or nodes.Const(None) for bound in (node.start, node.stop, node.step))
        return _through("#slice", start, stop, step)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        operator, right = node.ops[0].op, node.ops[0].expr
        if len(node.ops) > 1:
            raise TemplateSyntaxError("chains of comparisons are not allowed in chat templates", node.lineno)
        if operator in ("eq", "ne") and nodes.Const in (type(node.expr), type(right)):
            return node
        name = {"gteq": "ge", "lteq": "le", "notin": "in"}.get(operator, operator)
        test = nodes.Test(node.expr, name, [right], [], None, None, lineno=node.lineno)
        return nodes.Not(test, lineno=node.lineno) if operator == "notin" else test
