"""A jinja2 environment for templates that nobody has read: they come with model files.

Three fences.  jinja2's immutable sandbox keeps a template from private attributes and from changing what it
is given.  On top of it only known filters and methods can be called, each of them harmless.  And every
loop turn, operator, call, filter and output is counted against a `Budget`, in the compiled template itself,
so that it works in any thread and on any system.  Nothing of a template runs when it is compiled.

Settings and extra names are those with which Hugging Face transformers renders chat templates
(``utils/chat_template_utils.py``).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from itertools import islice
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from localllm.chat.budget import MAX_INT_BITS, Budget, OverBudgetError

# Longer templates are not compiled, because that alone would take too long.  gpt-oss, among the longest, has
# 17,000 characters and 2,700 tokens.
_MAX_CHARACTERS = 128 << 10
_MAX_TOKENS = 16 << 10

_MAX_COUNT = 10_000  # columns of a field, items of a batch, and the like

_budget: ContextVar[Budget] = ContextVar("template_budget")


class RefusedError(Exception):
    """The template called ``raise_exception``: its own words on what is wrong with the messages."""


class BoundedTemplate:
    """A compiled template.  It can be rendered from several threads at once."""

    def __init__(self, source: str) -> None:
        """Compile ``source``.

        Raises:
            jinja2.TemplateSyntaxError: it is not a valid template.
            ValueError: it is too long.
            RecursionError, SyntaxError, ValueError, MemoryError: it is nested too deeply, has a number that
                is too long, or is otherwise beyond what Python compiles.
        """
        environment = _Environment()
        n_tokens = len(list(islice(environment.lex(source[: _MAX_CHARACTERS + 1]), _MAX_TOKENS + 1)))
        if len(source) > _MAX_CHARACTERS or n_tokens > _MAX_TOKENS:
            raise ValueError(f"it is longer than {_MAX_CHARACTERS:,} characters or {_MAX_TOKENS:,} tokens")
        tree = cast(nodes.Template, _Metering().visit(environment.parse(source)))
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, object], input_bytes: int) -> str:
        """Render with variables of plain data (dicts, lists, strings, numbers, booleans, ``None``).

        Args:
            variables: what the template can read.
            input_bytes: their size, which the budget grows with.

        Raises:
            RefusedError: the template refused the variables.
            OverBudgetError: it used too much time or memory.
            Exception: whatever else a faulty template can cause.
        """
        token = _budget.set(Budget(input_bytes))
        try:
            return self._template.render(variables)
        finally:
            _budget.reset(token)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant wrote; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# Filters that only the compiled template itself can name: no template text contains "#" in a name.
_COUNTED, _MADE, _SPREAD, _CONCAT = "#counted", "#made", "#spread", "#concat"

# Filters that take a string apart, into objects many times its size.
_SPREADING = frozenset({"groupby", "list", "slice", "sort", "title"})

# Filters that return something that was there before, or a small number.
_PASSING = frozenset({"count", "d", "default", "first", "last", "length", "max", "min"})


class _Metering(NodeTransformer):
    """Puts the budget's filters around every part of a template that loops or makes a value."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(_COUNTED, node.iter)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.name in _SPREADING and node.node is not None:  # it is None in {% filter %}
            node.node = _through(_SPREAD, node.node)
        return node if node.name in _PASSING else _through(_MADE, node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # A constant goes through finalize, and so is counted; template data would not.
        return nodes.Const(node.data, lineno=node.lineno)


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Namespace(Namespace):
    """jinja2's, without private names, and without a text that writes out its (maybe endless) content."""

    def __init__(*args: Any, **attributes: Any) -> None:  # so that self=… can be an attribute
        values = dict(*args[1:], **attributes)
        for name in values:
            _check_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be an attribute of a namespace")


def _raise_exception(message: object) -> None:
    raise RefusedError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_COUNT:
        raise OverBudgetError("asks for a date of absurd length")
    return datetime.now().strftime(form)


_CALLABLE_STR_METHODS = frozenset(
    {
        *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "index", "isalnum"),
        *("isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"),
        *("isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit"),
        *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
    }
)
_CALLABLE_METHODS: dict[type, frozenset[str]] = {
    str: _CALLABLE_STR_METHODS,
    Markup: _CALLABLE_STR_METHODS,
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    LoopContext: frozenset({"changed", "cycle"}),
}


class _SafeFormat:
    """``str.format`` as jinja2's sandbox allows it, of bounded size."""

    def __init__(self, text: str, function: Callable[..., str]) -> None:
        self._text = text
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        fields = 0
        for _, field, spec, _ in string.Formatter().parse(self._text):
            fields += field is not None
            if spec and ("{" in spec or re.search(r"\d{5}", spec)):
                raise OverBudgetError("formats a field of absurd width")
        budget = _budget.get()
        budget.require(len(self._text) + fields * (budget.weight(args) + budget.weight(kwargs)))
        return self._function(*args, **kwargs)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
            finalize=_finalize,
            optimized=False,  # or constant expressions would be computed by the compiler
        )
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, of at most 100,000 numbers
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._callables = frozenset(map(id, self.globals.values()))
        self.filters = {**{name: FILTERS[name] for name in _PLAIN_FILTERS}, **_OWN_FILTERS}

    def getattr(self, obj: Any, attribute: str) -> Any:
        _budget.get().tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _budget.get().tick()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None or value.__name__ != "format":
            return None
        return _SafeFormat(value.__self__, safe)

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Macro | LoopContext | Undefined | _SafeFormat) or id(obj) in self._callables:
            return True
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if owner is dict:
            return bool(name == "fromkeys")
        return name in _CALLABLE_METHODS.get(type(owner), ())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The odd names leave every keyword free for the template, as in jinja2.
        budget = _budget.get()
        if not __self.is_safe_callable(__obj):
            name = getattr(__obj, "__name__", None) or type(__obj).__name__
            raise SecurityError(f"calling {name!r} is not allowed")
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext) and args:  # loop(children) in a recursive loop
            args = (budget.counted(args[0]), *args[1:])
        elif isinstance(owner, str):
            args = _check_str_method(budget, owner, __obj.__name__, args, kwargs)
        with budget.call():
            result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, dict) and __obj.__name__ == "get":
            return result
        return budget.admit(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        if operator == "*":
            _check_product(budget, left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_percent(budget, left, right)
        result = super().call_binop(context, operator, left, right)
        return budget.admit_sum(result, left, right) if operator == "+" else budget.admit(result)

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Context | None = None,
        eval_ctx: nodes.EvalContext | None = None,
    ) -> Any:
        """A filter by name, which is how ``map`` calls them."""
        budget = _budget.get()
        budget.tick()
        if name in _SPREADING:
            _spread(value)
        return budget.admit(super().call_filter(name, value, args, kwargs, context, eval_ctx))


@jinja2.pass_context  # needing the context keeps it from being run by the compiler
def _finalize(context: Context, value: Any) -> str:
    budget = _budget.get()
    budget.tick()
    text = value if isinstance(value, str) else _text(value)
    budget.charge(len(text))
    return text


def _text(value: Any) -> str:
    """``str(value)``, if that is not too long."""
    if not isinstance(value, str):
        budget = _budget.get()
        budget.require(budget.weight(value))
    return str(value)


def _check_count(value: Any) -> int:
    if not isinstance(value, int) or abs(value) > _MAX_COUNT:
        raise OverBudgetError(f"asks for a width or count of {str(value)[:30]}")
    return value


def _check_str_method(
    budget: Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Refuse a call that would make far more than it is given; return the arguments to call with."""
    if name in ("center", "ljust", "rjust", "zfill") and args:
        _check_count(args[0])
    elif name in ("split", "rsplit", "splitlines", "title"):
        separator = args[0] if args else kwargs.get("sep")
        parts = owner.count(separator) if isinstance(separator, str) and separator else len(owner) // 2
        budget.require(64 * parts)
    elif name == "replace" and len(args) >= 2:
        _check_replace(budget, owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        items = list(budget.counted(args[0]))
        _check_join(budget, owner, items)
        return (items,)
    return args


def _check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.require(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(budget: Budget, separator: str, items: list[Any]) -> None:
    budget.require(len(separator) * len(items) + sum(map(budget.weight, items)))


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int):
        left, right = right, left
    if isinstance(right, int):
        if isinstance(left, int) and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise OverBudgetError("computes with huge numbers")
        if isinstance(left, str | list | tuple):
            budget.require(budget.weight(left) * right)


def _check_power(base: Any, exponent: Any) -> None:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and max(base.bit_length(), 1) * abs(exponent) > MAX_INT_BITS
    ):
        raise OverBudgetError("computes with huge numbers")


def _check_percent(budget: Budget, form: str, values: Any) -> None:
    if re.search(r"\d{5}|%[-#0 +.\d]*\*", form):
        raise OverBudgetError("formats a field of absurd width")
    budget.require(len(form) + form.count("%") * budget.weight(values))


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    return _budget.get().counted(items)


@jinja2.pass_context
def _made(context: Context, value: Any) -> Any:
    budget = _budget.get()
    budget.tick()
    return budget.admit(value)


def _spread(value: Any) -> Any:
    if isinstance(value, str):
        _budget.get().require(64 * len(value))
    return value


@jinja2.pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    budget = _budget.get()
    budget.tick()
    return cast(str, budget.admit("".join(map(_text, parts))))


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterable[Any]:
    return cast(Iterable[Any], FILTERS["batch"](value, _check_count(linecount), fill_with))


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> Iterable[Any]:
    return cast(Iterable[Any], FILTERS["slice"](value, _check_count(slices), fill_with))


def _center(value: Any, width: int = 80) -> str:
    return _text(value).center(_check_count(width))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    form = _text(value)
    values = kwargs or args
    _check_percent(_budget.get(), form, values)
    return form % values


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(value)
    columns = len(width) if isinstance(width, str) else _check_count(width)
    _budget.get().require(len(text) + (text.count("\n") + 1) * columns)
    return cast(str, FILTERS["indent"](text, width, first, blank))


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    budget = _budget.get()
    items = list(budget.counted(value))
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    _check_join(budget, _text(d), items)
    return _text(d).join(map(_text, items))


def _replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    text, before, after = _text(value), _text(old), _text(new)
    _check_replace(_budget.get(), text, before, after)
    return text.replace(before, after, count)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 30:
        raise OverBudgetError("computes with huge numbers")
    return FILTERS["round"](value, precision, method)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment,
    value: Iterable[Any],
    attribute: str | int | None = None,
    start: int | float = 0,
) -> int | float:
    get = make_attrgetter(environment, attribute)
    total = start
    for item in _budget.get().counted(value):
        number = item if attribute is None else get(item)
        if not isinstance(number, int | float):  # adding up lists takes quadratic time
            raise TypeError(f"sum adds numbers, not {type(number).__name__!r}")
        total += number
    return total


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    budget = _budget.get()
    budget.require(budget.weight(value))
    columns = len(indent) if isinstance(indent, str) else _check_count(indent or 0)
    if columns > 64 or any(len(separator) > 64 for separator in separators or ()):
        raise OverBudgetError("asks for JSON of absurd width")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = []
    for part in encoder.iterencode(value):  # in parts, because deep indentation multiplies
        budget.charge(len(part))
        parts.append(part)
    return "".join(parts)


_PLAIN_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby"),
    *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique"),
    "upper",
)
_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    _CONCAT: _concat,
    _COUNTED: _counted,
    _MADE: _made,
    _SPREAD: jinja2.pass_context(lambda context, value: _spread(value)),
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "sum": _sum,
    "tojson": _tojson,
}
